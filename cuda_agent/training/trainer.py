"""Trains a model on rows of packed sequences. The class ``Trainer`` serves imitation, value pretraining and PPO.

The algorithms (``recipes``) define the losses. Weights are float32. With ``precision="bf16"`` the trunk (the model
without its output layer or value head) computes in bfloat16, so log-probabilities differ from those of the inference
engine. "auto" chooses bf16 if the device has bfloat16 instructions. Equal seeds, numbers of threads and data give equal
weights. Checkpoints exclude frozen parameters.

With a ``mesh``, one trainer runs in each of several processes (ranks). All ranks get the same batches and return the
same results. They share the weights (``sharding``), and divide the rows, or each row's tokens (``attention``)."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint as recomputed

from cuda_agent.lease import Lease
from cuda_agent.training import attention, checkpoint, losses, sharding
from cuda_agent.training.critic import Critic
from cuda_agent.training.losses import Metrics
from cuda_agent.training.memory import LOGITS, SMALL
from cuda_agent.training.muon import FloatMuon
from cuda_agent.training.packing import Batch, PackedRow, batch_of, before_sampled, tokens_of

COMPILATIONS = 64  # most of one layer; with torch's limit of 8, actor, critic and engine would end up running eagerly

Result = TypeVar("Result")
RowLoss = Callable[[PackedRow], tuple[Tensor, Metrics]]


class Trainer:
    """Trains one model on rows (sequences packed side by side) of at most ``row_tokens`` tokens; no sequence may be
    longer than a row. On a CPU, without a ``mesh``, a small model (at most ``SMALL`` parameters) computes several rows
    in parallel, each in one thread. The constructor raises ``ValueError`` if this class does not support the model or
    the combination of options."""

    def __init__(
        self,
        model: Any,
        *,
        row_tokens: int = 4096,
        max_grad_norm: float = 1.0,
        weight_decay: float = 0.0,
        optimizer: Literal["adamw", "muon"] = "adamw",
        device: str = "cpu",
        precision: Literal["fp32", "bf16", "auto"] = "fp32",
        gradient_checkpointing: bool = False,
        compile: bool = False,
        lease: Lease | None = None,
        mesh: DeviceMesh | None = None,
        parallelism: Literal["data", "context"] = "data",
    ) -> None:
        if mesh is not None and optimizer == "muon":
            raise ValueError("Muon orthogonalises whole matrices: with several ranks, which have parts, take AdamW")
        self.model = model if mesh is not None else model.to(device)
        self.ranks, self.rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        self.row_tokens, self.max_grad_norm = row_tokens, max_grad_norm
        self.device, self.lease = torch.device(device), lease
        self.precision = fast_precision(self.device) if precision == "auto" else precision
        self.step = 0  # optimizer steps taken
        self.seconds = 0.0  # time spent in steps of imitation; a schedule by time resumes from here
        trunk = self.trunk
        _without_dropout(trunk)
        model.train(gradient_checkpointing)
        if gradient_checkpointing:
            trunk.gradient_checkpointing_enable({"use_reentrant": False})
        self._compile = compile
        if compile:
            _compile_layers(trunk.layers, gradient_checkpointing)
        self._root = None if mesh is None else sharding.shard(model, trunk, mesh)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizers = _optimizers(model, optimizer, weight_decay)
        small = self.device.type == "cpu" and sum(parameter.numel() for parameter in model.parameters()) <= SMALL
        self.workers = torch.get_num_threads() if small and mesh is None else 1
        attention.register(compile)
        self._packed = attention.supports(trunk.config)
        self._parallelism = parallelism
        if parallelism == "context" and not self._packed:
            raise ValueError("rows of a model whose attention is not plain and causal cannot be cut over ranks")
        with torch.compiler.set_stance("force_eager"):  # compiles nothing for the few tokens of the check
            _check_rows(self)

    @property
    def trunk(self) -> Any:
        return self.model.trunk if isinstance(self.model, Critic) else self.model.base_model

    @property
    def graphs(self) -> int:
        """Returns how many graphs ``torch.compile`` has made in this process, or 0 if the layers are not compiled."""
        if not self._compile:
            return 0
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]

    @contextmanager
    def leased(self) -> Iterator[None]:
        """Holds the timing lease (``cuda_agent.lease``) in shared mode, so that no process times a kernel during the
        ``with`` block. Releases the lease when the GPU has finished the block's work. Ranks enter and leave the block
        together; the first rank holds the lease for all."""
        with self.lease.working() if self.lease else nullcontext():
            if self._root is not None:
                sharding.wait()
            try:
                yield
            finally:
                if self.device.type == "cuda" and (self.lease or self._root is not None):
                    torch.cuda.synchronize(self.device)
            if self._root is not None:
                sharding.wait()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Holds the timing lease (``leased``) during the ``with`` block. If the model supports packed attention, in
        which a token attends only to its own sequence, the block uses it."""
        with self.leased():
            usual = self.trunk.config._attn_implementation
            if self._packed:
                self.trunk.set_attn_implementation(attention.NAME)
            try:
                yield
            finally:
                if self._packed:
                    self.trunk.set_attn_implementation(usual)

    def within(self, job: Callable[[], Result]) -> Result:
        """Runs ``job``, a function that computes with the model. Gathers sharded weights as needed."""
        if self._root is None:
            return job()
        result = cast(Result, self._root(job))
        if not torch.is_grad_enabled():  # otherwise the backward pass needs and frees the weights
            self._root.reshard()  # type: ignore[operator]
        return result

    def states(self, row: PackedRow) -> Tensor:
        """Returns the hidden state of the trunk's last layer at the position before each of the row's n sampled tokens,
        float32 [n, hidden]. Call it inside ``working`` and ``within``. The row must be on the trainer's device."""
        extra = {"segments": attention.Segments(row.lengths, row.part)} if self._packed else {}
        low, alone = self.precision == "bf16", self.workers == self.ranks == 1
        with torch.autocast(self.device.type, torch.bfloat16, enabled=low, cache_enabled=alone):
            out = self.trunk(input_ids=row.ids[None], position_ids=row.positions[None], use_cache=False, **extra)
        return before_sampled(out.last_hidden_state[0], row).float()

    def logprobs(self, row: PackedRow, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities of the row's sampled tokens and entropies of their distributions, both float32 [n],
        in nats, at ``temperature``."""
        head = self.model.get_output_embeddings()
        chunk = max(1, LOGITS[self.device.type] // head.weight.shape[0])
        return losses.token_logprobs(self.states(row), row.targets, head, chunk, temperature)

    def values(self, row: PackedRow) -> Tensor:
        """Returns the critic's values of the states before the row's sampled tokens, float32 [n]."""
        return self.model.values(self.states(row))

    def flat(self, batch: Batch, of_row: Callable[[PackedRow], Tensor]) -> Tensor:
        """Applies ``of_row`` to all rows of a batch, without gradients. ``of_row`` returns one number per sampled token
        of a row. Returns these numbers in batch order: float32 [sampled tokens], on the CPU."""
        out = torch.zeros(len(batch))

        def fill(row: PackedRow) -> None:
            with torch.no_grad():
                out[row.tokens] = self.within(lambda: of_row(row.to(self.device))).float().cpu()

        for _ in self._side_by_side(fill, self._own_rows(batch, None)):
            pass
        return self.summed(out)

    def summed(self, flat: Tensor) -> Tensor:
        """Sums ``flat`` over the ranks, in place. Each rank has filled in its own tokens and left zeros elsewhere."""
        if self._root is not None:
            dist.all_reduce(flat)
        return flat

    def _own_rows(self, batch: Batch, chosen: Sequence[int] | None) -> list[PackedRow]:
        if self._parallelism == "context" and self._root is not None:
            return [attention.part_of(row, self.ranks, self.rank) for row in batch.rows(self.row_tokens, chosen)]
        rows = batch.rows(self.row_tokens, chosen, multiple=self.workers * self.ranks)
        return rows if self._root is None else sharding.rows_of_rank(rows, self.ranks, self.rank)

    def update(self, batch: Batch, chosen: Sequence[int] | None, lr: float, loss_of: RowLoss) -> dict[str, float]:
        """Takes one optimizer step on the sum of ``loss_of`` over the rows of the ``chosen`` sequences (None: all
        sequences). Clips the gradient to the norm ``max_grad_norm``. Returns the loss (``loss``), the metrics of
        ``loss_of``, and the gradient's norm before clipping (``grad_norm``). If the gradient is not finite, the weights
        stay as they are, ``grad_norm`` is 0 and the metric ``skipped`` is 1; otherwise ``skipped`` is 0."""

        def backward(row: PackedRow) -> tuple[Metrics, Sequence[Tensor | None]]:
            loss, metrics = self.within(lambda: loss_of(row.to(self.device)))
            metrics = metrics | {"loss": loss.detach()}
            if self.workers > 1:
                return metrics, torch.autograd.grad(loss, self.parameters, allow_unused=True)
            loss.backward()
            return metrics, ()

        for parameter in self.parameters:
            parameter.grad = None
        metrics: dict[str, float] = {}
        for measured, gradients in self._side_by_side(backward, self._own_rows(batch, chosen)):
            for parameter, gradient in zip(self.parameters, gradients, strict=False):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            metrics = losses.added(metrics, {name: float(value) for name, value in measured.items()})
        if self._root is not None:
            parts: list[Any] = [None] * self.ranks
            dist.all_gather_object(parts, metrics)
            metrics = functools.reduce(losses.added, parts)
        with self.working():
            norm = float(sharding.whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)))
            if math.isfinite(norm):
                for optimizer in self.optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = lr
                    optimizer.step()
        self.step += 1
        return metrics | {"grad_norm": norm if math.isfinite(norm) else 0.0, "skipped": float(not math.isfinite(norm))}

    def _side_by_side(self, job: Callable[[PackedRow], Result], rows: Sequence[PackedRow]) -> Iterator[Result]:
        """Yields the result of ``job`` for each row, in order. Computes up to ``workers`` rows in parallel. Jobs run
        inside ``working``."""
        if self.workers == 1:
            for row in rows:
                with self.working():
                    result = job(row)
                yield result
            return

        def alone(row: PackedRow) -> Result:
            torch.set_num_threads(1)  # sets this thread and also the default of later threads
            return job(row)

        with ThreadPoolExecutor(self.workers) as pool:
            for start in range(0, len(rows), self.workers):
                with self.working():
                    results = list(pool.map(alone, rows[start : start + self.workers]))
                    torch.set_num_threads(torch.get_num_threads())  # restores this thread's number as the default
                yield from results

    def trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yields names and values of the parameters that are not frozen; a tied parameter comes once."""
        return ((name, tensor) for name, tensor in self.model.named_parameters() if tensor.requires_grad)

    def weights(self) -> dict[str, Tensor]:
        """On the first rank, returns the trained parameters, whole and on the CPU. On the other ranks, returns an empty
        dict."""
        gathered = ((name, sharding.whole(tensor)) for name, tensor in self.trained())
        return {name: tensor.cpu() for name, tensor in gathered if self.rank == 0}

    def save(self, folder: Path) -> None:
        """Writes the trained parameters, the optimizers' state, torch's random state, ``step`` and ``seconds`` into the
        existing ``folder``. Each rank writes its part."""
        table = checkpoint.table_of(list(self.trained()), self.optimizers)
        table |= {"random": torch.get_rng_state(), "step": torch.tensor(self.step)}
        checkpoint.write(table | {"seconds": torch.tensor(self.seconds, dtype=torch.float64)}, folder)

    def load(self, folder: Path) -> None:
        """Restores a state that ``save`` wrote, with the same or another number of ranks. If the state does not fit the
        model or is damaged, changes nothing and raises ``CorruptCheckpoint``."""
        table = checkpoint.read(folder, self.trained())
        try:
            random, step, seconds = (table.pop(name) for name in ("random", "step", "seconds"))
        except KeyError as missing:
            raise checkpoint.CorruptCheckpoint(f"{folder} has no {missing}") from None
        checkpoint.restore(table, self.trained(), self.optimizers)
        torch.set_rng_state(random)
        self.step, self.seconds = int(step), float(seconds)


def _compile_layers(layers: Any, gradient_checkpointing: bool) -> None:
    """Compiles the layers with ``torch.compile``. All layers have the same code, so one compilation serves all. With
    gradient checkpointing, the layer is compiled, but not the checkpoint function around it. If a compiled checkpoint
    contained a graph break, such as packed attention, PyTorch would run it eagerly."""
    if gradient_checkpointing:  # dynamic: a row may be recomputed after a longer one was compiled
        call = _limited(torch.compile(_call, dynamic=True))
        for layer in layers:
            layer._gradient_checkpointing_func = functools.partial(recomputed, call, use_reentrant=False)
        return
    for layer in layers:
        layer._compiled_call_impl = _limited(torch.compile(layer._call_impl))


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _limited(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``compiled`` as a function that may be compiled up to ``COMPILATIONS`` times. Each thread has its own
    limit, so the returned function raises the limit of the thread that calls it. The backward pass runs in other
    threads."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch._dynamo.config.recompile_limit < COMPILATIONS:
            torch._dynamo.config.recompile_limit = COMPILATIONS
        return compiled(*args, **kwargs)

    return call


def fast_precision(device: torch.device) -> Literal["fp32", "bf16"]:
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return "bf16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "fp32"


def _optimizers(model: Any, name: Literal["adamw", "muon"], weight_decay: float) -> list[torch.optim.Optimizer]:
    """Makes the optimizers. If ``name`` is "adamw", AdamW trains all parameters. If it is "muon", Muon trains the
    matrices except the embeddings, the output layer and the value head, and AdamW trains the rest. Muon's steps are
    scaled to the size of AdamW's (arXiv 2502.16982), so that one learning rate serves both."""
    ends = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inner = [p for p in trained if p.ndim == 2 and min(p.shape) > 1 and id(p) not in ends] if name == "muon" else []
    taken = {id(parameter) for parameter in inner}
    matrices = [p for p in trained if p.ndim >= 2 and id(p) not in taken]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)]
    if inner:
        muon = torch.optim.Muon if fast_precision(inner[0].device) == "bf16" else FloatMuon
        optimizers.append(muon(inner, lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def _without_dropout(model: torch.nn.Module) -> None:
    """Turns dropout off. PPO's probability ratios require that equal weights give equal probabilities."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010


def _check_rows(trainer: Trainer) -> None:
    """Tests two assumptions of the trainer on a few tokens: sequences in the same row do not attend to each other, and
    the model's logits are the unchanged result of its output layer. Raises ``ValueError`` if one of them does not hold
    for this model."""
    vocabulary = trainer.trunk.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    pair = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (5, 7)]
    batch = batch_of([tokens_of(ids, [1] * len(ids)) for ids in pair])
    (together,) = batch.rows(12)
    apart = [batch.rows(12, [number])[0] for number in (0, 1)]
    tolerance = 0.1 if trainer.precision == "bf16" else 1e-2
    rows = [row.to(trainer.device) for row in (together, *apart)]
    with torch.no_grad(), trainer.working():
        packed, *single = trainer.within(lambda: [trainer.states(row).cpu() for row in rows])
    by_token = torch.empty_like(packed)
    by_token[together.tokens] = packed
    worst = (by_token - torch.cat(single)).abs().max() / packed.square().mean().sqrt()
    if worst > tolerance:
        raise ValueError(f"sequences packed into one row see each other in this model (states differ by {worst:.2g})")
    if isinstance(trainer.model, Critic):
        return

    def both() -> tuple[Tensor, Tensor]:
        logits = trainer.model(input_ids=rows[1].ids[None], use_cache=False).logits[0, :-1].float().cpu()
        return logits, trainer.model.get_output_embeddings()(single[0].to(trainer.device)).float().cpu()

    with torch.no_grad(), trainer.leased():
        logits, ours = trainer.within(both)
    if (logits - ours).abs().max() > tolerance * logits.square().mean().sqrt():
        raise ValueError("this model does more to its logits than its output layer (scaling or capping): not supported")
