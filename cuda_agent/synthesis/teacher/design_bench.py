"""Times the designs of a task on a GPU. ``design_sweep`` runs this module as a child process.

A design is one way to write the task's kernel. The process reads requests from standard input: each has the task's
source and some built designs. The process writes answers to standard output. Requests and answers are lines of JSON. At
its start the process writes ``{"ready": true}``. It answers each request with these lines, in this order:

- ``{"held": true}``: the process holds the timing lease, the lock that keeps other processes off the device.
- ``{"seconds": time}``: the time of the task's model in eager PyTorch.
- For each design ``{"seconds": time}``, or ``{"wrong": reason}`` if its outputs are wrong. The answer is
  ``{"wrong": reason, "kind": kind}`` if the outputs are right for inputs of the kind ``normal`` (the values that the
  task draws), but wrong for another kind.

After an error the process writes ``{"error": reason}`` and ends.

A design's outputs must agree with the model's by the rule of the sandbox's judge. They are compared for one set of
inputs of each kind. A kernel that writes beyond its outputs is not noticed."""

import contextlib
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from cuda_agent.lease import Lease
from cuda_agent.sandbox import driver
from cuda_agent.sandbox.wire import printable
from cuda_agent.sandbox.worker.gpu import DeviceClock, bind_plan, open_gpu, unload_plan
from cuda_agent.sandbox.worker.shared_tensors import Slots, flatten
from cuda_agent.sandbox.worker.values.input_kinds import vary

_CALLS, _FEW = 12, 3  # timed calls of a design, and of one that is clearly slower than the best so far
_SLOWER, _LONGEST = 1.5, 0.1  # how much slower; seconds after which a slow design gets no more calls
_ROUNDING = 1e-2  # least scale of an output, as a share of its scale for normal inputs


class _Memory(Slots):
    """The buffers that a design's kernels read and write, as addresses of tensors of this process. ``bind_plan`` takes
    them in this form. A slot is the set of buffers of one call. There is one slot for each item of ``inputs``, which
    holds the input tensors of one call. All slots share the tensors ``outputs``."""

    def __init__(self, inputs: Sequence[Sequence[torch.Tensor]], outputs: Sequence[torch.Tensor]) -> None:
        self.layout, self.device, self.weights = [{} for _ in inputs], "cuda", []
        self.inputs = [[tensor.data_ptr() for tensor in one] for one in inputs]
        self.outputs = [[tensor.data_ptr() for tensor in outputs]] * len(inputs)


class _Bench:
    """Times calls on the device, each with a cold L2 cache."""

    def __init__(self) -> None:
        open_gpu()
        self._clock = DeviceClock()
        self._flushed = torch.zeros(2 * driver.l2_bytes(), dtype=torch.uint8, device="cuda")

    def seconds(self, call: Callable[[], Any], best: float = math.inf) -> float:
        """Returns the median time of ``call`` on the device, in seconds. ``best`` is the shortest median of the designs
        timed so far. If the first few calls are clearly slower than ``best``, no more calls follow."""
        times: list[float] = []
        while len(times) < _CALLS and sum(times) < _LONGEST:
            if len(times) == _FEW and statistics.median(times) > _SLOWER * best:
                break
            self._flushed.zero_()
            torch.cuda.synchronize()
            times.append(self._clock(call)[1][0])
        return statistics.median(times)


def values_off(
    want: torch.Tensor, have: torch.Tensor, tolerance: float, cap: float = 1.0, usual: torch.Tensor | None = None
) -> int:
    """Returns how many values of the output ``have`` are wrong by the judge's rule (``judge.memory.check.mismatch``). A
    value may differ from the expected value in ``want`` by ``tolerance * (scale + magnitude)``. ``magnitude`` is the
    absolute expected value. ``scale`` is the root mean square of ``want``, at most ``cap``, and at least a hundredth
    of that of ``usual``, the model's output for normal inputs (as ``judge.strict`` excuses rounding)."""
    scale = _scale(want).clamp(max=cap)
    if usual is not None:
        scale = scale.maximum(_ROUNDING * _scale(usual))
    return int((~((want - have).abs() <= tolerance * (scale.to(want.dtype) + want.abs()))).sum())


def _scale(output: torch.Tensor) -> torch.Tensor:
    return output.double().square().mean().sqrt()


_Case = tuple[str, Sequence[torch.Tensor], Sequence[torch.Tensor]]  # kind, inputs, outputs of the model


def cases(model: Callable[..., Any], inputs: list[torch.Tensor], kinds: Sequence[str]) -> Iterator[_Case]:
    """Yields test cases: a kind of inputs, the inputs, and the outputs of ``model`` for them. The first case has the
    kind ``normal`` and the unchanged ``inputs``. Then each of ``kinds`` has a case, unless no inputs of this kind can
    be made from ``inputs`` or the model's outputs for them are not finite."""
    for kind in ("normal", *kinds):
        varied = vary(inputs, kind)
        if varied is not None:
            wanted = flatten(model(*varied))
            if kind == "normal" or all(bool(tensor.isfinite().all()) for tensor in wanted):
                yield kind, varied, wanted


def _fault(
    run: Callable[[int], None], known: Sequence[_Case], outputs: Sequence[Any], tolerance: float
) -> dict[str, Any] | None:
    """Runs a design on each test case in ``known``. ``run`` takes the index of a case, and the design then writes to
    ``outputs``. Returns the answer to send if an output is wrong, and None otherwise."""
    for slot, (kind, _, wanted) in enumerate(known):
        for output in outputs:
            output.fill_(math.nan)
        run(slot)
        cap, three = 1.0 if kind == "normal" else math.inf, zip(wanted, outputs, known[0][2], strict=True)
        if off := sum(values_off(want, have, tolerance, cap, usual) for want, have, usual in three):
            return {"wrong": f"{off} values are wrong"} | ({} if kind == "normal" else {"kind": kind})
    return None


def _answers(request: Mapping[str, Any], open_bench: Callable[[], _Bench]) -> Iterator[dict[str, Any]]:
    """Yields the answers to ``request``, which has a task's source and its programs (built designs). The first answer
    says that this process holds the timing lease, a lock on the device. The second has the time of the task's model in
    eager PyTorch. Then each program has one answer: its time, or the reason why it is wrong. The lease is held for the
    whole request (about a second), because even untimed work on the device would disturb the judge's times."""
    names: dict[str, Any] = {}
    exec(request["code"], names)
    torch.manual_seed(0)
    with contextlib.closing(Lease(Path(request["lease"]))) as lease, lease.timing():
        yield {"held": True}
        bench = open_bench()
        with torch.device("cuda"):
            model, inputs = names["Model"](*names["get_init_inputs"]()).eval(), names["get_inputs"]()
        known = list(cases(model, inputs, request["kinds"]))
        outputs = [tensor.new_empty(tensor.shape) for tensor in known[0][2]]
        memory = _Memory([inputs for _, inputs, _ in known], outputs)
        yield {"seconds": bench.seconds(partial(model, *inputs))}
        best = math.inf
        for program in request["programs"]:
            run = bind_plan(program, memory)
            answer = _fault(run, known, outputs, request["tolerance"])
            answer = answer or {"seconds": bench.seconds(partial(run, 0), best)}
            best = min(best, answer.get("seconds", math.inf))
            unload_plan(run)
            yield answer


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else must come between the answers
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # threads that wait for each other on busy cores take longer than the work
    try:
        open_bench = cache(_Bench)  # a CUDA context is made under the lease
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            for answer in _answers(json.loads(line), open_bench):
                print(json.dumps(answer), file=answers, flush=True)
    except Exception as error:  # the context may be damaged: the next request needs a new process
        print(json.dumps({"error": printable(f"{type(error).__name__}: {error}")[:400]}), file=answers, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    _main()
