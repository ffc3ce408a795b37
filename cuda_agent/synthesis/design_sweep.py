"""Finds the best design of a task of the teacher's family on a GPU: draws designs, builds them and times them.

``Sweep`` builds on the processor's cores and asks a child process (this module as a program) for times. The child needs
no jail, because all code that it runs is ours: ``family.parse`` refuses any other task. It compares outputs as the
judge does, but only for one input; it cannot notice a kernel that writes beyond its outputs."""

import asyncio
import contextlib
import json
import math
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from cuda_agent.errors import SandboxUnready
from cuda_agent.lease import Lease
from cuda_agent.sandbox import driver
from cuda_agent.sandbox.build.builder import BuildError
from cuda_agent.sandbox.formats.solution_format import SolutionError
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.wire import Solution, TaskSpec, printable
from cuda_agent.sandbox.worker.gpu import DeviceClock, bind_plan, open_gpu, unload_plan
from cuda_agent.sandbox.worker.shared_tensors import Slots, flatten
from cuda_agent.synthesis.optimum import Optimum
from cuda_agent.synthesis.teacher import Worked, solve
from cuda_agent.tasks.task import Task

DESIGNS = 48  # designs that are timed for a task, if there are so many
_DRAWS = 4  # most draws for each of them
_CALLS, _LONGEST = 12, 0.1  # timed calls of a design; seconds after which a slow design gets no more calls
_ANSWER_SECONDS = 120.0  # for one answer of the child, its start included
COMMAND = [sys.executable, "-P", "-m", "cuda_agent.synthesis.design_sweep"]


class Sweep:
    """Sweeps over the designs of tasks, in one child for all tasks. Use it as an async context manager."""

    def __init__(self, sandbox: LocalSandbox, designs: int = DESIGNS) -> None:
        self._sandbox, self._designs = sandbox, designs
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> "Sweep":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def __call__(self, task: Task) -> Optimum:
        """Returns the optimum of ``task``. Equal tasks get equal draws.

        Raises:
            ValueError: The task is not of the teacher's family.
            SandboxUnready: The child cannot even run the task itself."""
        drawn, right = draw_designs(task, self._designs)
        spec = await self._sandbox.spec(task)
        built = await asyncio.gather(*(self._built(worked, spec) for worked in right))
        async with self._turn:
            eager, times = await self._times(task, [program for program in built if isinstance(program, dict)])
        answers = iter(times)
        found = {
            worked.design: next(answers) if isinstance(program, dict) else program
            for worked, program in zip(right, built, strict=True)
        }
        return summary(eager, drawn, found)

    async def _built(self, worked: Worked, spec: TaskSpec) -> dict[str, Any] | str:
        """Returns the program of a design, or why it does not build."""
        try:
            return await self._sandbox.prepare(Solution("plan", worked.files), spec)
        except (SolutionError, BuildError) as error:
            return f"does not build: {error}"

    async def _times(self, task: Task, programs: Sequence[dict[str, Any]]) -> tuple[float, list[float | str]]:
        """Returns eager's seconds and, for each program, its seconds or why it failed. If a program kills the child, a
        new one goes on with the next program."""
        eager: float | None = None
        found: list[float | str] = []
        failures = 0
        while eager is None or len(found) < len(programs):
            await self._send({
                "code": task.code, "tolerance": self._sandbox.config.tolerance,
                "lease": str(self._sandbox.lease_folder), "programs": programs[len(found) :],
            })  # fmt: skip
            answer = await self._answer()
            if isinstance(answer, str):
                await self._end()
                failures += 1
                if failures == 2:
                    raise SandboxUnready(f"the sweep over designs of {task.name} fails: {answer}")
                continue
            eager = answer
            while self._child and len(found) < len(programs):
                found.append(await self._answer())
        return eager, found

    async def _send(self, request: Mapping[str, Any]) -> None:
        if self._child is None:
            environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
            pipe = asyncio.subprocess.PIPE
            self._child = await asyncio.create_subprocess_exec(*COMMAND, stdin=pipe, stdout=pipe, env=environment)
        assert self._child.stdin
        with contextlib.suppress(ConnectionError):  # a child that has died gives no answer
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            await self._child.stdin.drain()

    async def _answer(self) -> float | str:
        """Returns the child's next answer: seconds, or a failure. After an error the child has ended."""
        assert self._child and self._child.stdout
        try:
            line = await asyncio.wait_for(self._child.stdout.readline(), _ANSWER_SECONDS)
            answer = json.loads(line) if line else {"error": f"the child ended with {await self._child.wait()}"}
        except (TimeoutError, ValueError):  # ValueError: half a line
            answer = {"error": f"the child gave no answer in {_ANSWER_SECONDS:g} s"}
        if "error" in answer:
            await self._end()
        return float(answer["seconds"]) if "seconds" in answer else str(answer.get("error") or answer["wrong"])

    async def _end(self) -> None:
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()
            await self._child.wait()
            self._child = None


def draw_designs(task: Task, designs: int = DESIGNS) -> tuple[Counter[Any], list[Worked]]:
    """Returns how often each design was drawn, and at most ``designs`` that the teacher believes right, each once.

    Raises:
        ValueError: The task is not of the teacher's family."""
    rng = Random(f"sweep/{task.digest}")
    drawn: Counter[Any] = Counter()
    right: dict[Any, Worked] = {}
    while len(right) < designs and drawn.total() < _DRAWS * designs:
        worked = solve(task, rng, "cuda")
        drawn[worked.design] += 1
        if worked.status == "ok":
            right[worked.design] = worked
    return drawn, list(right.values())


def summary(eager: float, drawn: Counter[Any], found: Mapping[Any, float | str]) -> Optimum:
    """Returns the optimum from ``found``: the seconds of each design, or why it failed. A design that is not in
    ``found`` is not right."""
    times = {design: seconds for design, seconds in found.items() if not isinstance(seconds, str)}
    surprises = tuple(f"{design}: {reason}" for design, reason in found.items() if isinstance(reason, str))
    if not times:
        return Optimum(eager, None, None, 0.0, surprises=surprises)
    best = min(times, key=lambda design: times[design])
    right = sum(drawn[design] for design in times) / drawn.total()
    return Optimum(eager, times[best], statistics.median(times.values()), right, str(best), surprises)


# ----------------------------------------------------------------------------------------------------------- the child


class _Memory(Slots):
    """One slot whose buffers are this process's own tensors."""

    def __init__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        self.layout, self.device, self.weights = [{}], "cuda", []
        self.inputs, self.outputs = ([[tensor.data_ptr() for tensor in part]] for part in (inputs, outputs))


class _Bench:
    """Times calls on the device, each with a cold L2 cache."""

    def __init__(self) -> None:
        open_gpu()
        self._clock = DeviceClock()
        self._flushed = torch.zeros(2 * driver.l2_bytes(), dtype=torch.uint8, device="cuda")

    def seconds(self, call: Callable[[], Any]) -> float:
        """Returns the median seconds of ``call``."""
        times: list[float] = []
        while len(times) < _CALLS and sum(times) < _LONGEST:
            self._flushed.zero_()
            torch.cuda.synchronize()
            times.append(self._clock(call)[1][0])
        return statistics.median(times)


def values_off(want: torch.Tensor, have: torch.Tensor, tolerance: float) -> int:
    """Returns how many values of ``have`` are wrong, by the judge's rule (``judge.memory.check``)."""
    scale = want.double().square().mean().sqrt().clamp(max=1.0).to(want.dtype)
    return int((~((want - have).abs() <= tolerance * (scale + want.abs()))).sum())


def _answers(request: Mapping[str, Any], bench: _Bench) -> Iterator[dict[str, Any]]:
    """Yields eager's answer, then one for each program: its seconds, or what is wrong. Holds the timing lease for the
    whole request (about a second), because its other work on the device would disturb the judge's times."""
    names: dict[str, Any] = {}
    exec(request["code"], names)
    torch.manual_seed(0)
    with contextlib.closing(Lease(Path(request["lease"]))) as lease, lease.timing():
        with torch.device("cuda"):
            model, inputs = names["Model"](*names["get_init_inputs"]()).eval(), names["get_inputs"]()
        wanted = flatten(model(*inputs))
        outputs = [tensor.new_empty(tensor.shape) for tensor in wanted]
        memory = _Memory(inputs, outputs)
        yield {"seconds": bench.seconds(partial(model, *inputs))}
        for program in request["programs"]:
            for output in outputs:
                output.fill_(math.nan)
            run = bind_plan(program, memory)
            run(0)
            off = [values_off(want, have, request["tolerance"]) for want, have in zip(wanted, outputs, strict=True)]
            seconds = math.inf if any(off) else bench.seconds(partial(run, 0))
            unload_plan(run)
            yield {"wrong": f"{sum(off)} values are wrong"} if any(off) else {"seconds": seconds}


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else must come between the answers
    torch.set_grad_enabled(False)
    try:
        bench = _Bench()
        for line in sys.stdin:
            for answer in _answers(json.loads(line), bench):
                print(json.dumps(answer), file=answers, flush=True)
    except Exception as error:  # the context may be damaged: the next request needs a new process
        print(json.dumps({"error": printable(f"{type(error).__name__}: {error}")[:400]}), file=answers, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    _main()
