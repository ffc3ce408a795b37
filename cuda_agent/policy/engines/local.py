"""Defines ``LocalEngine``, which serves a policy inside this process.

The engine has continuous batching, prefix reuse and one worker thread. Up to rounding, a completion depends only on the
weights, the prompt and the sampling parameters. The seed and a token's position determine the random number with which
the token is drawn. Rounding depends on the other requests in the batch. Waiting requests join the batch in order of
submission, after ``QUIET_PASSES`` passes of the event loop without a new request. If callers await nothing but
completions, every run forms the same batches and gives bit-identical results. There is no top-p sampling, because it
would bias PPO's probability ratio."""

import asyncio
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cuda_agent.config import PolicyConfig
from cuda_agent.lease import Lease
from cuda_agent.policy.engines.decoder import Decoder, Job, make_decoder, rounding, verify
from cuda_agent.policy.engines.engine import Completion, EngineError, SamplingParams, fitted
from cuda_agent.policy.engines.sampling import draw, uniforms

QUIET_PASSES = 8
SMALL = 2**24  # most parameters of a model that one thread decodes on a CPU
KEPT_TOKENS_PER_ROW = 1024  # times the number of rows: most tokens of finished sequences that are kept
PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}  # most per pass, or one prompt; the lease is released between passes
SEEN_TOKENS = {"cpu": 1 << 30, "cuda": 131_072}  # most that these see: a pass copies their keys and values on a GPU
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}  # rounding alone causes 1e-6
LOW_TOLERANCE, ROUNDINGS = 0.05, 4  # in half precision: the larger of 0.05 and of 4 times the effect of a rounding


@dataclass(eq=False)
class _Request:
    prompt: list[int]
    params: SamplingParams  # fitted to the context
    noise: np.ndarray  # float64 [max_tokens], uniform in [0, 1)
    future: "asyncio.Future[Completion]"
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Counts:
    sampled: int = 0  # sampled tokens
    prefilled: int = 0  # computed prompt tokens
    reused: int = 0  # prompt tokens copied from a kept prefix or an equal prompt
    steps: int = 0
    seconds: float = 0.0  # seconds in which the engine computed
    waited: float = 0.0  # seconds in which it waited for the timing lease


class LocalEngine:
    """An engine that computes in this process. It copies ``model``, a causal model of the transformers library, to
    ``device`` and ``dtype``. CPU operators use up to ``threads`` threads. Decoding with a model of at most ``SMALL``
    parameters uses one: compilers run beside it, and two threads wait for each other longer than they compute. At most
    ``batch`` requests are decoded at once. ``lease`` is a handle of the timing lease, a lock that other processes take
    to time a kernel. If it is given, the engine pauses while a kernel is timed. Only this engine may use the handle.
    The constructor and ``update_from`` raise ``EngineError`` if the decoder does not reproduce the model's
    log-probabilities."""

    def __init__(
        self,
        model: Any,
        threads: int = 2,
        batch: int = 32,
        lease: Lease | None = None,
        *,
        device: str = "cpu",
        dtype: str | None = None,
    ) -> None:
        self.version = 0
        self.counts = Counts()
        self._batch = batch
        self._lease = lease
        self._dtype = getattr(torch, dtype) if dtype else None
        self._device = torch.empty(0, device=device).device  # a device with its number, such as cuda:0
        self._waiting: list[_Request] = []
        self._active: list[_Request] = []  # request i is row i; only the worker thread uses it while it works
        self._kept: list[tuple[np.ndarray, Any]] = []  # (ids, what the decoder kept of them), oldest first
        self._interrupt = False  # tells the worker to return after its current step
        self._driver: asyncio.Task[None] | None = None
        self._updating = asyncio.Lock()
        self._failure: BaseException | None = None
        small = self._device.type == "cpu" and sum(one.numel() for one in model.parameters()) <= SMALL
        self._threads, self._decoding_threads = threads, 1 if small else threads
        self._worker = ThreadPoolExecutor(1, "engine", initializer=_init_thread, initargs=(threads, self._device))
        self._decoder: Decoder = self._worker.submit(self._load, model, None).result()

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        """Samples a completion that ends at a stop token, after ``max_tokens``, or where the context is full. Raises
        ``ValueError`` if the prompt is empty or fills the context, and ``EngineError`` if the engine has failed."""
        params = fitted(params, prompt, self._decoder.context)
        noise = uniforms(params.seed, len(prompt), params.max_tokens)
        future = asyncio.get_running_loop().create_future()
        request = _Request(list(prompt), params, noise, future)
        if self._failure:
            raise EngineError(f"the engine has failed: {self._failure}") from self._failure
        self._waiting.append(request)
        self._interrupt = True
        self._wake()
        try:
            return await request.future
        except asyncio.CancelledError:
            self._interrupt = True  # frees the request's row soon
            raise

    async def update_from(self, model: Any, version: int) -> None:
        """Makes the engine serve the weights of ``model`` as ``version``. Requests in the batch first finish with the
        old weights; waiting requests get the new weights."""
        async with self._updating:
            if self._driver and not self._driver.done():
                await asyncio.wait([self._driver])  # ends with the active requests
            if self._failure:
                raise EngineError(f"the engine has failed: {self._failure}") from self._failure
            try:
                load = asyncio.get_running_loop().run_in_executor(self._worker, self._load, model, self._decoder)
                self._decoder = await load
            except BaseException as error:
                self._failure = error  # never continue with wrong weights
                raise
            self.version = version
        if self._waiting:
            self._wake()

    async def compute(self, job: Callable[[], Any]) -> Any:
        """Runs ``job`` in the worker thread, while no decoding runs there, and returns its result. A second thread
        would slow down ``job`` and decoding, because OpenMP would have more threads than processors."""

        def alone() -> Any:
            torch.set_num_threads(self._threads)
            return job()

        return await asyncio.get_running_loop().run_in_executor(self._worker, alone)

    async def close(self) -> None:
        """Stops the engine and cancels its requests."""
        self._failure = EngineError("the engine is closed")
        for request in [*self._waiting, *self._active]:
            request.future.cancel()
        self._waiting.clear()
        self._interrupt = True
        if self._driver and not self._driver.done():
            await asyncio.wait([self._driver])
        self._worker.shutdown()

    # On the event loop

    def _wake(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """Adds waiting requests to the batch, then decodes until a request ends or a new one arrives. Repeats this
        until the batch is empty and no waiting request may join. While weights are updated, no request may join."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._wait_until_quiet()
                free = self._batch - sum(not request.future.cancelled() for request in self._active)
                updating = self._updating.locked()
                joining = [] if updating else [r for r in self._waiting if not r.future.cancelled()][:free]
                if not joining and not self._active:
                    return
                taken = set(map(id, joining))
                self._waiting = [r for r in self._waiting if id(r) not in taken and not r.future.cancelled()]
                self._interrupt = False
                for request, finish in await loop.run_in_executor(self._worker, self._work, joining):
                    if not request.future.done():
                        request.future.set_result(Completion(request.ids, request.logprobs, self.version, finish))
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                self._failure = error
            self._interrupt = True
            for request in [*self._waiting, *self._active]:
                if not request.future.done() and not request.future.get_loop().is_closed():
                    failed = EngineError(f"the engine has failed: {error}")
                    request.future.set_exception(failed) if self._failure else request.future.cancel()
            self._waiting.clear()
            if self._failure is None:
                raise

    async def _wait_until_quiet(self) -> None:
        quiet = 0
        while quiet < QUIET_PASSES:
            before = len(self._waiting)
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._waiting) == before else 0

    # In the worker thread

    def _load(self, model: Any, decoder: Decoder | None) -> Decoder:
        with torch.inference_mode(), self._working():
            if model.device != self._device or self._dtype not in (None, model.dtype):
                model = copied(model, self._device, self._dtype)
            if decoder is None or not decoder.take(model):
                decoder = make_decoder(model, max(self._batch, 2))
            difference = verify(decoder, model)
            tolerance = PROBE_TOLERANCE.get(model.dtype, LOW_TOLERANCE)
            if model.dtype not in PROBE_TOLERANCE and not difference <= tolerance:
                tolerance = ROUNDINGS * rounding(model)
            if not difference <= tolerance:
                raise EngineError(f"the decoder's log-probabilities differ from the model's by {difference:.2e}")
        self._kept.clear()
        return decoder

    @contextmanager
    def _working(self) -> Iterator[None]:
        asked = time.perf_counter()
        with self._lease.working() if self._lease else nullcontext():
            began = time.perf_counter()
            self.counts.waited += began - asked
            try:
                yield
            finally:
                if self._lease and self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                self.counts.seconds += time.perf_counter() - began

    @torch.inference_mode()
    def _work(self, joining: list[_Request]) -> list[tuple[_Request, Any]]:
        """Adds the requests ``joining`` to the batch and decodes until a request ends or ``_interrupt`` is set. Returns
        the requests that ended, with their finish reasons."""
        torch.set_num_threads(self._decoding_threads)
        if cancelled := [row for row, request in enumerate(self._active) if request.future.cancelled()]:
            with self._working():
                for row in reversed(cancelled):
                    self._leave(row)
        ended = self._join(joining) if joining else []
        if not self._active or ended:
            return ended
        while True:
            with self._working():
                ended = self._advance()
            if ended or self._interrupt:
                return ended

    def _advance(self) -> list[tuple[_Request, Any]]:
        """Draws at least one next token of each active request. Removes the requests that end, and returns them with
        their finish reasons."""
        places = [len(request.prompt) + len(request.ids) - 1 for request in self._active]
        steps = min(self._decoder.most_steps, self._decoder.context - max(places))
        # One copy to the device: each copy waits for it, and it may be busy with other processes.
        rows = [
            [request.ids[-1], place, request.params.temperature, *_noise(request, steps)]
            for request, place in zip(self._active, places, strict=True)
        ]
        table = torch.tensor(rows, dtype=torch.float64, device=self._device)
        ids, positions = table[:, :2].t().long()
        drawn = self._decoder.sample(ids, positions, table[:, 3:], table[:, 2], max(places))
        self.counts.steps += steps
        return self._take(*drawn, 0)

    def _join(self, joining: list[_Request]) -> list[tuple[_Request, Any]]:
        """Computes the prompts of the requests ``joining`` in new rows of the batch, and samples each request's first
        token. Returns the requests that ended with this token, with their finish reasons."""
        kept: dict[int, Any] = {}  # snapshots to restore, by row
        leaders: dict[tuple[int, ...], int] = {}
        twins: list[tuple[int, int, int]] = []  # source row, row, length
        jobs: list[Job] = []
        picks = []
        for row, request in enumerate(joining, len(self._active)):
            prompt = tuple(request.prompt)
            if prompt in leaders:
                twins.append((jobs[leaders[prompt]][0], row, len(prompt)))
                self.counts.reused += len(prompt)
            else:
                leaders[prompt] = len(jobs)
                start, kept[row] = self._take_kept(request.prompt)
                jobs.append((row, start, request.prompt[start:]))
                self.counts.reused += start
                self.counts.prefilled += len(prompt) - start
            picks.append(leaders[prompt])
        parts = []
        kind = self._device.type
        for chunk in _chunks(jobs, PREFILL_TOKENS[kind], SEEN_TOKENS[kind]):
            with self._working():
                for row, start, _ in chunk:
                    if start:
                        self._decoder.restore(row, kept[row], start)
                parts.append(self._decoder.prefill(chunk))
        with self._working():
            logits = torch.cat(parts)
            for source, row, length in twins:
                self._decoder.copy(source, row, length)
            self._active += joining
            rows = [[pick, r.params.temperature, *_noise(r, 1)] for pick, r in zip(picks, joining, strict=True)]
            pick, temperatures, noise = torch.tensor(rows, dtype=torch.float64, device=logits.device).t()
            ids, logprobs = draw(logits[pick.long()], noise, temperatures)
            return self._take(ids[:, None], logprobs[:, None], len(self._active) - len(joining))

    def _take_kept(self, prompt: list[int]) -> tuple[int, Any]:
        """Finds the finished sequence in ``_kept`` that has the longest common prefix with ``prompt[:-1]``. Returns the
        prefix's length and the decoder's snapshot of the sequence, or (0, None) if no prefix can be reused. If the
        prefix is the complete sequence, removes the sequence from ``_kept``."""
        best, best_length = None, 0
        wanted = np.array(prompt[:-1])
        for index in reversed(range(len(self._kept))):
            ids = self._kept[index][0]
            common = min(len(ids), len(wanted))
            differ = np.flatnonzero(ids[:common] != wanted[:common])
            length = int(differ[0]) if len(differ) else common
            if length > best_length and (self._decoder.partial or length == len(ids)):
                best, best_length = index, length
        if best is None:
            return 0, None
        ids, kept = self._kept[best]
        if best_length == len(ids):  # most likely the same episode
            del self._kept[best]
        return best_length, kept

    def _take(self, ids: Tensor, logprobs: Tensor, first: int) -> list[tuple[_Request, Any]]:
        """Appends drawn tokens to the active request ``first`` and to each later one. ``ids`` and ``logprobs``, both
        [requests, steps], belong to these requests. Drops tokens after a request's end. Removes the requests that end,
        and returns them with their finish reasons."""
        requests = self._active[first:]
        found = torch.cat([ids.double(), logprobs.double()], 1).tolist()  # one copy to the host
        ended = []
        for row, (request, numbers) in enumerate(zip(requests, found, strict=True), first):
            before, finish = len(request.ids), ""
            for token, logprob in zip(map(int, numbers[: ids.shape[1]]), numbers[ids.shape[1] :], strict=True):
                request.ids.append(token)
                request.logprobs.append(logprob)
                if token in request.params.stop_ids:
                    finish = "stop"
                elif len(request.ids) == request.params.max_tokens:
                    finish = "length"
                if finish:
                    ended.append((row, request, finish))
                    break
            self.counts.sampled += len(request.ids) - before
        for row, request, _ in reversed(ended):
            self._keep(row, request)
            self._leave(row)
        return [(request, finish) for _, request, finish in ended]

    def _keep(self, row: int, request: _Request) -> None:
        ids = np.array(request.prompt + request.ids[:-1])  # the last token was sampled, but is not in the cache
        self._kept.append((ids, self._decoder.keep(row, len(ids))))
        while sum(len(ids) for ids, _ in self._kept) > KEPT_TOKENS_PER_ROW * self._batch:
            del self._kept[0]

    def _leave(self, row: int) -> None:
        last = self._active.pop()
        if row < len(self._active):
            self._decoder.move(len(self._active), row, len(last.prompt) + len(last.ids))
            self._active[row] = last


def make_engine(model: Any, policy: PolicyConfig, lease: Path) -> LocalEngine:
    """Returns an engine with the settings in ``policy``. ``lease`` is the folder of the timing lease, with which other
    processes pause the engine to time a kernel."""
    place: dict[str, Any] = {"device": policy.device, "dtype": policy.dtype}
    return LocalEngine(model, policy.threads, policy.engine_batch, Lease(lease), **place)


def _init_thread(threads: int, device: torch.device) -> None:
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _noise(request: _Request, count: int) -> list[float]:
    """Returns the random numbers for the request's next ``count`` tokens, with zeros for tokens after its last one."""
    numbers = request.noise[len(request.ids) : len(request.ids) + count].tolist()
    return numbers + [0.0] * (count - len(numbers))


def _chunks(jobs: Sequence[Job], most: int, seen: int) -> Iterator[Sequence[Job]]:
    """Yields groups of consecutive jobs. A job is (row, position of the first new token, new tokens). The jobs of a
    group together have at most ``most`` new tokens, and at most ``seen`` cached and new tokens. A job that exceeds one
    of these limits by itself is the only job of its group."""
    begin, new, whole = 0, 0, 0
    for index, (_, start, ids) in enumerate(jobs):
        if index > begin and (new + len(ids) > most or whole + start + len(ids) > seen):
            yield jobs[begin:index]
            begin, new, whole = index, 0, 0
        new, whole = new + len(ids), whole + start + len(ids)
    yield jobs[begin:]


def copied(model: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Returns a copy of ``model`` on ``device``. Its parameters get the type ``dtype``; if ``dtype`` is None, they keep
    their types. Buffers always keep their types: rotary frequencies in bfloat16 would be so inexact that the angles of
    distant positions would be wrong by radians."""
    copy_of = copy.deepcopy(model).to(device)
    for parameter in copy_of.parameters():
        parameter.data = parameter.data.to(dtype or parameter.dtype)
    return copy_of
