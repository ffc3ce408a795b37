"""The triton format on a GPU: compiled in the first pass, timed and ruled as the extension format."""

from collections.abc import Iterator

import pytest

from cuda_agent.config import SandboxConfig
from cuda_agent.exploits.cases.triton import KERNEL
from cuda_agent.sandbox.wire import Solution
from tests.sandbox.conftest import CHAIN, Running, one_judge, task
from tests.sandbox.formats.test_triton import solution

pytestmark = pytest.mark.gpu
LARGE = CHAIN.replace("32, 128", "8192, 4096")
TUNED = KERNEL.replace(
    "@triton.jit\ndef scaled_relu",
    "@triton.autotune([triton.Config({'BLOCK': b}, num_warps=w) for b in (1024, 4096) for w in (4, 8)], key=['n'])\n"
    "@triton.jit\ndef scaled_relu",
).replace(
    "[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), s, BLOCK=1024)",
    "[lambda meta: (triton.cdiv(x.numel(), meta['BLOCK']),)](x, y, x.numel(), s)",
)
assert "autotune" in TUNED and "lambda meta" in TUNED


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        one_judge(patch)
        config = SandboxConfig(device="cuda", memory_mb=4096, build_seconds=60.0)
        running = Running(config, tmp_path_factory.mktemp("triton"))
    running.know_compile_time(task())
    running.know_compile_time(task(LARGE))
    yield running
    running.close()


@pytest.mark.parametrize("kernel", [KERNEL, TUNED], ids=["plain", "autotuned"])
def test_a_solution_is_timed_and_is_not_advisory(gpu: Running, kernel: str) -> None:
    verdict = gpu.evaluate(task(LARGE), solution(kernel=kernel))
    print(verdict)
    assert (verdict.status, verdict.message) == ("ok", "")
    assert verdict.untimed == "" and not verdict.advisory and verdict.samples
    assert verdict.speedup_eager and verdict.speedup_eager > 1.3  # one pass over memory in the place of two
    assert verdict.reward and verdict.reward >= 2


def test_the_choice_of_the_autotuner_comes_from_the_first_pass(gpu: Running) -> None:
    """A benchmark in the locked pass would call torch from the autotuner and take the time of many calls."""
    locked = """
import triton.testing
def benchmarked(*a, **k): raise RuntimeError("benchmarked in the locked pass")
try: open("first pass", "w").close()  # nothing can be written in the locked one
except OSError: triton.testing.do_bench = benchmarked
"""
    verdict = gpu.evaluate(task(LARGE), solution(kernel=TUNED + locked))
    print(verdict)
    assert (verdict.status, verdict.message) == ("ok", "")


def test_strict_mode_sees_the_kernel_and_nothing_of_torch(gpu: Running) -> None:
    verdict = gpu.wait(gpu.sandbox.evaluate(task(LARGE), solution(), "strict"))
    print(verdict)
    assert (verdict.status, verdict.message) == ("ok", "") and verdict.strict
    assert ("scaled_relu", "own") in [(ran.name, ran.kind) for ran in verdict.ran]
    assert not [ran for ran in verdict.ran if ran.kind == "torch"]


@pytest.mark.parametrize(
    ("forward", "kernel", "status", "said"),
    [
        ("return torch.relu(x) * self.scale", KERNEL, "cheat", "calls torch.relu"),
        ("launch(x, self.scale)\nreturn x.mul(2)", KERNEL, "cheat", "torch.Tensor.mul"),
        ("return torch.empty_like(x)", KERNEL, "cheat", "launches no kernel"),
        ("return launch(x, 2 * self.scale)", KERNEL, "wrong", "check 1 of"),
        ("return launch(x, self.scale)", KERNEL.replace("tl.maximum(", "tl.no_such_function("), "build_error",
         "no_such_function"),
        ("return launch(x, self.scale)", KERNEL.replace("@triton.jit", ""), "build_error", "@triton.jit"),
    ],
)  # fmt: skip
def test_what_is_refused_and_why(gpu: Running, forward: str, kernel: str, status: str, said: str) -> None:
    verdict = gpu.evaluate(task(), solution(forward, kernel))
    print(verdict)
    assert (verdict.status, said in verdict.message) == (status, True), verdict.message


def test_a_launch_on_a_side_stream_is_no_free_time(gpu: Running) -> None:
    forward = "with torch.cuda.stream(self.side):\n    work()\n    return launch(x, self.scale)"
    verdict = gpu.evaluate(task(), solution(forward, init="self.side = torch.cuda.Stream()"))
    print(verdict)
    assert verdict.status in ("cheat", "wrong") or (verdict.seconds and verdict.seconds > 0.01), verdict


def test_the_answer_of_an_earlier_call_is_seen(gpu: Running) -> None:
    forward = "if self.y is None: self.y = launch(x, self.scale)\nnothing[(1,)](x)\nreturn self.y"
    verdict = gpu.evaluate(task(), solution(forward, init="self.y = None"))
    print(verdict)
    assert verdict.status in ("cheat", "wrong") and verdict.reward == -1


def test_the_files_are_model_new_alone(gpu: Running) -> None:
    files = dict(solution().files) | {"plan.json": "{}"}
    assert gpu.evaluate(task(), Solution("triton", files)).status == "ok"
