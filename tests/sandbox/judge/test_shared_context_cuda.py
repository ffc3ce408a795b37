"""One CUDA context for many plans, on a GPU: verdicts are those of contexts of their own."""

from typing import Any

import pytest

from cuda_agent.sandbox.jail.descendants import descendants
from cuda_agent.sandbox.wire import Verdict
from tests.sandbox.conftest import Running, task
from tests.sandbox.test_cuda import KERNEL, LARGE, plan

pytestmark = pytest.mark.gpu

RIGHT = "y[i + j] = fmaxf(x[i + j], 0.0f) * scale;"


@pytest.fixture(scope="module", autouse=True)
def _shared_context(gpu: Running) -> None:
    for number in range(3):  # a first best time, a first context, a first use of it
        assert judged(gpu, f"// warm {number}").status == "ok"


def judged(running: Running, note: str = "", mode: Any = "quick", line: str = RIGHT) -> Verdict:
    """Returns the verdict on the plan with ``note`` above its kernel, and with ``line`` as the kernel's computation."""
    return running.evaluate(task(LARGE), plan(f"{note}\n{KERNEL}".replace(RIGHT, line)), mode=mode)


def processes(running: Running) -> set[int]:
    running.probe(task(LARGE))  # the judge answers when it has cleaned up
    process = running.sandbox._judges[0]._process
    assert process
    return descendants(process.pid)


def test_plans_are_judged_without_a_new_process(gpu: Running) -> None:
    before = processes(gpu)
    speeds = [judged(gpu, f"// same {number}").speedup_eager or 0.0 for number in range(6)]
    assert processes(gpu) == before
    strict = judged(gpu, "// strict", "strict").speedup_eager
    print(speeds, strict)
    assert all(abs(speed / strict - 1) < 0.05 for speed in speeds if strict)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("y[i + j] = fmaxf(x[i + j], 0.0f) * scale + 1.0f;", "wrong"),
        ("*(volatile T*)16ull = x[i + j];", "crash"),
        ("__trap();", "crash"),
        ('for (;;) asm volatile("");', "timeout"),
    ],
    ids=["wrong", "illegal address", "trap", "endless"],
)
def test_a_bad_plan_leaves_nothing_to_the_next_one(gpu: Running, line: str, status: str) -> None:
    assert judged(gpu, f"// before {status}").status == "ok"
    assert judged(gpu, line=line).status == status
    assert judged(gpu, f"// after {status} {line[:9]}").status == "ok"


HOARD = """
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    float* kept = (float*)malloc(1 << 20);
    if (kept) for (int k = 0; k < 1 << 18; k++) kept[k] = x[k];
  }
"""


def test_memory_that_a_plan_never_frees_ends_with_its_context(gpu: Running) -> None:
    line = RIGHT + HOARD
    assert [judged(gpu, f"// hoard {number}", line=line).status for number in range(3)] == ["ok"] * 3
    assert judged(gpu, "// after hoarding").status == "ok"
