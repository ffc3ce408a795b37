"""What ran on a GPU, its peaks, and a floor that a forged clock meets."""

import pytest

from cuda_agent.optimize.verdict_text import verdict_lines
from cuda_agent.sandbox import driver
from cuda_agent.sandbox.judge.timing import roofline
from cuda_agent.sandbox.wire import Solution, Verdict
from tests.sandbox import published
from tests.sandbox.conftest import CHAIN, Running, task
from tests.sandbox.test_cuda import MATMUL, PYTHON, plan

pytestmark = pytest.mark.gpu

HUGE = CHAIN.replace("torch.randn(32, 128)", "torch.randn(8192, 16384)")


def strict(gpu: Running, code: str, solution: Solution) -> Verdict:
    verdict = gpu.wait(gpu.sandbox.evaluate(task(code), solution, "strict"))
    print("\n".join(verdict_lines(verdict)))
    print(verdict.phases)
    assert isinstance(verdict, Verdict)
    return verdict


def python(body: str) -> Solution:
    return Solution("python", {"model_new.py": PYTHON.replace("BODY", body)})


def test_the_driver_tells_the_peaks(gpu: Running) -> None:
    peaks = roofline.of_gpu()
    print(driver.identity(), peaks)
    assert peaks.bytes_per_second and 1e11 < peaks.bytes_per_second < 1e14
    assert peaks.cache_bytes and peaks.cache_bytes > 1 << 20
    assert not peaks.operations or peaks.operations["float32"] > 1e12


def test_the_nodes_of_a_plan_have_shares_of_the_devices_time(gpu: Running) -> None:
    verdict = strict(gpu, HUGE, plan())
    assert verdict.status == "ok"
    assert [(r.name, r.kind, r.calls, r.share) for r in verdict.ran] == [("chain<float, 4>", "own", 1, 1.0)]
    assert verdict.bytes == 2 * 8192 * 16384 * 4
    assert verdict.seconds and verdict.peak_bytes_per_second
    assert 0.2 < verdict.bytes / verdict.seconds / verdict.peak_bytes_per_second < 1.05


def test_kernels_of_an_extension_are_its_own(gpu: Running) -> None:
    verdict = strict(gpu, published.TASK, Solution("extension", published.FILES))
    assert verdict.status == "ok"
    assert ("norm_gelu_forward", "own") in {(r.name, r.kind) for r in verdict.ran}
    assert not any(line.startswith("not observed") for line in verdict.advice)
    (kernel,) = [r for r in verdict.ran if r.name.startswith("norm_gelu_kernel")]
    assert (kernel.kind, kernel.calls) == ("own", 1) and kernel.share == pytest.approx(1)


def test_torch_and_its_libraries_are_named_in_the_python_lane(gpu: Running) -> None:
    code = MATMUL.replace("randn(2048, 16), torch.randn(16, 512)", "randn(2048, 2048), torch.randn(2048, 2048)")
    module = PYTHON.replace("__init__(self, scale)", "__init__(self)").replace("self.scale = scale", "pass")
    module = module.replace("forward(self, x)", "forward(self, a, b)").replace(
        "BODY", "return (a @ b).contiguous() + 0"
    )
    verdict = strict(gpu, code, Solution("python", {"model_new.py": module}))
    assert verdict.status == "ok"
    assert {"aten.mm", "aten.add"} <= {r.name for r in verdict.ran if r.kind == "torch"}
    assert verdict.flops == 2 * 2048**3 and verdict.peak_flops
    assert not any(line.startswith("not observed") for line in verdict.advice)
    assert any(r.kind == "library" and r.share and r.share > 0.5 for r in verdict.ran)
    assert not any(r.kind == "own" for r in verdict.ran)


def test_a_claim_below_the_floor_is_a_cheat_where_the_judges_clock_cannot_resolve_it(gpu: Running) -> None:
    forged = "torch.cuda.Event.elapsed_time = lambda *a: 0.001\n        return torch.relu(x) * self.scale"
    verdict = gpu.evaluate(task(HUGE), python(forged))
    print(verdict)
    assert verdict.status == "cheat"
    assert gpu.evaluate(task(HUGE), python("return torch.relu(x) * self.scale")).status == "ok"


TRANSPOSED = HUGE.replace("torch.relu(x) * self.scale", "x.t().contiguous()")


def test_a_view_in_the_place_of_a_copy_pays_for_it_and_accuses_nobody(gpu: Running) -> None:
    verdict = gpu.evaluate(task(TRANSPOSED), python("return x.t()"))
    print(verdict)
    assert (verdict.status, verdict.message) == ("ok", "")
    assert verdict.speedup_eager and 0.7 < verdict.speedup_eager < 1.4


def test_beside_an_output_that_is_a_view_the_others_are_paid_for(gpu: Running) -> None:
    code = HUGE.replace("torch.relu(x) * self.scale", "(x.t(), x + 0.0)")
    verdict = gpu.evaluate(task(code), python("return x.t(), x"))
    print(verdict)
    assert (verdict.status, verdict.message) == ("ok", "")
    assert verdict.speedup_eager and 0.7 < verdict.speedup_eager < 1.4


def test_a_task_whose_outputs_are_views_has_no_floor(gpu: Running) -> None:
    code = HUGE.replace("torch.relu(x) * self.scale", "x.t()")
    verdict = gpu.evaluate(task(code), python("return x.t()"))
    assert verdict.status == "ok", verdict
    diagonal = CHAIN.replace("torch.randn(32, 128)", "torch.randn(8192), torch.randn(8192, 8192)")
    diagonal = diagonal.replace("forward(self, x)", "forward(self, a, b)")
    diagonal = diagonal.replace("torch.relu(x) * self.scale", "torch.diag(a) @ b")
    module = PYTHON.replace("forward(self, x)", "forward(self, a, b)").replace("BODY", "return a[:, None] * b")
    verdict = gpu.evaluate(task(diagonal), Solution("python", {"model_new.py": module}))
    print("\n".join(verdict_lines(verdict)))
    assert verdict.status == "ok" and verdict.speedup_eager and verdict.speedup_eager > 10
