"""The sweep on a GPU: times of real designs, and what becomes of designs that are wrong or break the context."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cuda_agent.lease import Lease
from cuda_agent.sandbox.wire import Solution, TaskSpec
from cuda_agent.synthesis.teacher import design_sweep
from cuda_agent.synthesis.teacher.cuda_kernels import KERNEL
from cuda_agent.synthesis.teacher.design_sweep import Sweep, draw_designs
from cuda_agent.synthesis.teacher.family import FamilySpec, make_task, parse, task_spec
from cuda_agent.synthesis.teacher.optimum import Swept
from cuda_agent.tasks.task import Task
from tests.sandbox.conftest import Running

pytestmark = pytest.mark.gpu

ROWS = make_task(FamilySpec((("tanh", None),), "layer_norm", 2048, 4096))
COLUMNS = make_task(FamilySpec((("tanh", None),), "column_var", 256, 16384))
TRANSPOSED = make_task(FamilySpec((("gelu", None),), "transpose", 2096, 1000))
CHAIN = make_task(FamilySpec((("mish", None), ("mul_y", None)), None, 1024, 999))


class Spoiling:
    """The sandbox, which changes the source of the second design."""

    def __init__(self, gpu: Running, change: Callable[[str], str]) -> None:
        self.sandbox, self.change, self.built = gpu.sandbox, change, 0
        self.config, self.lease_folder = self.sandbox.config, self.sandbox.lease_folder

    async def prepare(self, solution: Solution, spec: TaskSpec) -> dict[str, Any]:
        self.built += 1
        source = solution.files[KERNEL]
        if self.change(source) != source and "namespace d1" in source:
            start, stop = source.index("namespace d1"), source.index("namespace d2")
            changed = self.change(source[start:stop])
            assert changed != source[start:stop]
            solution = replace(solution, files=solution.files | {KERNEL: source[:start] + changed + source[stop:]})
        return await self.sandbox.prepare(solution, spec)


def swept(gpu: Running, sandbox: Any, *tasks: Task, designs: int = 6) -> list[Swept]:
    async def run() -> list[Swept]:
        async with Sweep(sandbox, designs) as sweep:
            return list(await asyncio.gather(*map(sweep, tasks)))

    return gpu.wait(run())


def test_designs_are_timed_and_the_judge_agrees_with_the_best_one(gpu: Running) -> None:
    tasks = ROWS, CHAIN, COLUMNS, TRANSPOSED
    for task, optimum in zip(tasks, swept(gpu, gpu.sandbox, *tasks, designs=12), strict=True):
        print(optimum)
        assert gpu.wait(gpu.sandbox.spec(task)) == task_spec(parse(task))
        assert optimum.surprises == ()
        assert optimum.seconds and optimum.median_seconds and optimum.speedup
        assert 1e-6 < optimum.seconds <= optimum.median_seconds < 1e-1
        gpu.know_compile_time(task)
        judged = gpu.wait(Sweep(gpu.sandbox, 12).judged(task, optimum))
        print(judged)
        assert judged.design in optimum.fastest and judged.surprises == () and judged.speedup
        assert 0.7 < optimum.speedup / judged.speedup < 1.4


def _wrong(source: str) -> str:
    return source.replace("v = tanh(v);", "v = 2 * tanh(v) + v * v;")


def _stray(source: str) -> str:
    return source.replace("z[i] = ", "z[i + (1L << 40)] = ")


def _unbuilt(source: str) -> str:
    return source.replace("v = tanh(v);", "v = tanh(v), nothing();")


def test_designs_that_do_not_build_together_are_built_alone(gpu: Running) -> None:
    sandbox = Spoiling(gpu, _unbuilt)
    (optimum,) = swept(gpu, sandbox, ROWS)
    assert sandbox.built == 7 and optimum.surprises == () and optimum.seconds


def test_a_wrong_design_is_named(gpu: Running) -> None:
    (optimum,) = swept(gpu, Spoiling(gpu, _wrong), ROWS)
    (surprise,) = optimum.surprises
    assert surprise.endswith("values are wrong") and str(draw_designs(ROWS, 6)[1][1].design) in surprise
    assert optimum.seconds


def test_a_design_that_breaks_the_context_is_named_and_the_others_are_timed(gpu: Running) -> None:
    broken, whole = swept(gpu, Spoiling(gpu, _stray), CHAIN, ROWS)
    (surprise,) = broken.surprises
    print(surprise)
    assert str(draw_designs(CHAIN, 6)[1][1].design) in surprise and "rror" in surprise
    assert broken.seconds and whole.seconds and whole.surprises == ()


def test_the_timing_lease_is_held_while_a_design_is_timed(gpu: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> bool:
        async with Sweep(gpu.sandbox, 2) as sweep:
            await sweep(ROWS)  # the child has started
            monkeypatch.setattr(design_sweep, "_ANSWER_SECONDS", 3.0)  # the wait for the lease is longer
            lease = Lease(gpu.sandbox.lease_folder)
            with lease.working():
                waiting = asyncio.ensure_future(sweep(CHAIN))
                done, _ = await asyncio.wait([waiting], timeout=4)
            optimum = await waiting
            lease.close()
            return not done and optimum.surprises == ()

    assert gpu.wait(run())
