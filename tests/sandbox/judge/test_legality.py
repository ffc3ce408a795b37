"""What ran in one call: observed in a worker, sorted by the judge."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuda_agent.optimize.verdict_text import verdict_lines
from cuda_agent.sandbox.judge import legality
from cuda_agent.sandbox.wire import Ran, Solution, Verdict
from cuda_agent.sandbox.worker import observe
from cuda_agent.sandbox.worker.shared_tensors import owned
from tests.sandbox.conftest import Running, plan_solution, task
from tests.sandbox.formats.test_extension import LINEAR, MODEL, folder
from tests.sandbox.judge.timing.test_roofline import PYTHON

KERNELS = [
    ("void norm_gelu_kernel<256>(float*, float const*, int, float)", "own"),
    ("relu_all", "own"),
    ("void (anonymous namespace)::hidden<int>(int*)", "own"),
    ("void cutlass::Kernel<mine>(mine::Params)", "own"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::relu(float)>(int, float)", "torch"),
    ("void at_cuda_detail::cub::DeviceReduceKernel<int>(int)", "torch"),
    ("ampere_sgemm_128x64_nn", "library"),
    ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x32_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
     "library"),
    ("nvjet_tst_128x64_64x8_1x2_h_bz_TNT", "library"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_32x3_nn_align4>(int)", "library"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)", "memset"),
    ("void cudnn::ops::nchwToNhwcKernel<float>(int)", "library"),
    ("void implicit_convolve_sgemm<float, 128>(int)", "library"),
    ("void gemv2T_kernel_val<int, float>(int)", "library"),
    ("fused_softmax", "own"),
    ("somebody_elses_kernel", "unknown"),
]  # fmt: skip
LIBRARY = (
    b"\x7fELF..._Z16norm_gelu_kernelILi256EEvPfPKfif\0relu_all\0_ZN12_GLOBAL__N_16hiddenIiEEvPT_\0_ZN7cutlass6KernelI\0"
)
SOURCES = ["@triton.jit\ndef fused_softmax(x):\n    pass  # like at::native::vectorized_elementwise_kernel\n"]


@pytest.mark.parametrize(("name", "kind"), KERNELS)
def test_a_kernel_has_a_kind_by_its_name(name: str, kind: str) -> None:
    assert legality.kind_of(name, "\n".join(SOURCES), LIBRARY) == kind


@pytest.mark.parametrize(
    ("name", "base", "short"),
    [
        ("void norm<128>(float*)", "norm", "norm<128>"),
        ("void a::b::c<f<int>, (g)1>(int (*)(int))", "c", "a::b::c<f<int>, (g)1>"),
        ("void (anonymous namespace)::k(int)", "k", "k"),
        ("plain", "plain", "plain"),
        ("aten.addmm", "aten.addmm", "aten.addmm"),
        ("", "", ""),
    ],
)
def test_names_are_cut_to_what_tells_them_apart(name: str, base: str, short: str) -> None:
    assert (legality.base_name(name), legality.short(name)) == (base, short)


def test_a_plan_is_known_exactly() -> None:
    nodes = [
        {"memset": "out:0", "bytes": 4, "value": 0},
        {"symbol": "node1", "function": "add<512>", "grid": 1, "args": []},
        {"symbol": "node2", "function": "add<512>", "grid": 1, "args": []},
        {"library": "gemm", "compute": "tf32"},
    ]
    plain = [Ran("memset", "memset", 1), Ran("add<512>", "own", 2), Ran("gemm tf32", "library", 1)]
    assert legality.of_plan(nodes) == plain
    assert legality.of_plan(nodes, [0.1, 0.2, 0.3, 0.4]) == [
        Ran("add<512>", "own", 2, 0.5),
        Ran("gemm tf32", "library", 1, 0.4),
        Ran("memset", "memset", 1, 0.1),
    ]
    for nonsense in ([0.1], ["a"] * 4, [float("nan")] * 4, [-1.0] * 4, {"a": 1}, "text", [0.0] * 4):
        assert legality.of_plan(nodes, nonsense) == plain


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["own", "torch"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@given(ANYTHING)
def test_whatever_a_worker_tells_becomes_good_records(told: Any) -> None:
    for wrapped in (told, [told], [["name", "own", told, told]], [[told, told, 1, None]], [["k(", "", 2, told]] * 90):
        ran = legality.of_call([wrapped, None])
        assert len(ran) <= 64
        for record in ran:
            assert record.name.isprintable() and record.calls > 0 and type(record.calls) is int
            assert record.kind in ("own", "library", "torch", "memset", "unknown")
            assert record.share is None or 0 <= record.share <= 1
        legality.advice(ran, "")


def test_operators_that_compute_are_counted_and_others_are_not() -> None:
    x = torch.randn(8, 16)

    def call(seen: observe.Operators) -> None:
        y = torch.empty_like(x).copy_(x).t().contiguous().view(-1, 2)
        y.zero_()
        seen.add("mine", "own", 0.0)
        (torch.relu(x) + torch.relu(y).sum()).to(torch.float64)

    told = observe.operators(call, "cpu")
    counts = {(name, kind): calls for name, kind, calls, _ in told}
    assert counts == {
        ("mine", "own"): 1, ("aten.zero_", "memset"): 1, ("aten.relu", "torch"): 2, ("aten.sum", "torch"): 1,
        ("aten.add", "torch"): 1,
    }  # fmt: skip
    shares = [share for *_, share in told]
    assert all(0 <= share <= 1 for share in shares) and sum(shares) <= 1
    assert all(share is None for *_, share in observe.operators(call, "cuda"))


def test_a_view_of_something_is_copied_and_a_tensor_of_its_own_is_not() -> None:
    x = torch.randn(4, 6)
    given_area = range(x.data_ptr(), x.data_ptr() + 96)
    mine = torch.randn(4, 6)
    assert owned(mine, given_area) is mine
    for view in (x, x.view(-1), mine.t(), torch.randn(6).expand(4, 6)):
        copy = owned(view, given_area)
        assert torch.equal(copy, view) and copy.is_contiguous()
        assert copy.untyped_storage().data_ptr() not in (mine.data_ptr(), x.data_ptr())


def strict(running: Running, code: str | None, solution: Solution) -> Verdict:
    return running.wait(running.sandbox.evaluate(task(code) if code else task(), solution, "strict"))


def test_the_nodes_of_a_plan_are_in_every_verdict(running: Running, timed: Running) -> None:
    assert running.evaluate(task(), plan_solution()).ran == [Ran("chain", "own", 1)]
    verdict = strict(timed, None, plan_solution())
    assert verdict.ran == [Ran("chain", "own", 1, 1.0)] and "observe" in verdict.phases
    assert verdict.advice == []


@pytest.mark.nightly
def test_the_functions_of_an_extension_are_its_own(timed: Running) -> None:
    timed.know_compile_time(task(LINEAR))
    verdict = strict(timed, LINEAR, folder())
    assert (verdict.status, [(r.name, r.kind, r.calls) for r in verdict.ran]) == ("ok", [("linear_relu", "own", 1)])
    assert verdict.ran[0].share and 0 < verdict.ran[0].share <= 1
    assert verdict.advice == []


def test_an_operator_behind_the_rules_back_is_seen(running: Running) -> None:
    """The rule looks at torch's Python functions; the dispatcher sees what came around them."""
    sums = "x = torch.relu(x) + x - torch.relu(x)"
    sneaky = MODEL.replace("return cuda", f"with torch._C.DisableTorchFunction(): {sums}\n        return cuda")
    verdict = running.evaluate(task(LINEAR), folder(model=sneaky))
    assert verdict.status == "ok"
    assert {r.name for r in verdict.ran if r.kind == "torch"} >= {"aten.relu", "aten.add"}
    assert any(line.startswith("torch computed a part: ") for line in verdict.advice)
    assert all(record.share is None for record in verdict.ran)  # a share is a time, which the model clock has not


def test_a_solution_that_is_all_torch_is_told_so(running: Running) -> None:
    verdict = running.evaluate(task(), Solution("python", {"model_new.py": PYTHON}))
    assert verdict.status == "ok"
    assert {(r.name, r.kind) for r in verdict.ran} == {("aten.relu", "torch"), ("aten.mul", "torch")}
    assert verdict.advice[-1].startswith("nothing of the solution's own was seen to run: torch computed with aten.")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import os; os._exit(3)", "ended itself (exit 3)"),
        ("raise ValueError('seen')", "ValueError: seen"),
        ("return torch.zeros_like(x)", "another answer while it was observed"),
        ("while True: pass", "did not finish in time"),
    ],
)
def test_what_goes_wrong_under_observation_changes_no_verdict(running: Running, line: str, words: str) -> None:
    observed = "        if torch.utils._python_dispatch._is_in_torch_dispatch_mode:\n            "
    code = PYTHON.replace("        return torch", f"{observed}{line}\n        return torch")
    verdict = running.evaluate(task(), Solution("python", {"model_new.py": code}))
    assert (verdict.status, verdict.checks, verdict.ran) == ("ok", 5, [])
    assert verdict.advice[-1].startswith("not observed: ") and words in verdict.advice[-1]
    assert running.evaluate(task(), plan_solution()).status == "ok"


@pytest.mark.parametrize(
    "nonsense",
    [
        "5",
        "{'a': 1}",
        "'text'",
        "[5, [], [1]]",
        "[['\\ud800', 'own', True, 9]]",
        "[['\\ud800', '', 1, None]]",
        "[[]] * 9999",
    ],
)
def test_nonsense_instead_of_what_ran_is_left_out(running: Running, nonsense: str) -> None:
    lie = (
        "import sys\nsys.modules['cuda_agent.sandbox.worker.observe']"
        f".operators = lambda *a: (a[0](None), {nonsense})[1]\n"
    )
    verdict = running.evaluate(task(), Solution("python", {"model_new.py": lie + PYTHON}))
    assert (verdict.status, verdict.message) == ("ok", "")
    assert verdict.ran in ([], [Ran(" ", "own", 1)], [Ran(" ", "unknown", 1)])


def test_a_verdict_with_records_survives_its_journey(running: Running) -> None:
    verdict = running.evaluate(task(), Solution("python", {"model_new.py": PYTHON}))
    assert verdict.ran and Verdict.from_json(verdict.to_json()) == verdict
    old = {key: value for key, value in verdict.to_json().items() if key not in ("ran", "advice")}
    assert Verdict.from_json(old).ran == []


def test_the_screen_shows_shares_of_the_peak_what_ran_and_the_advice() -> None:
    verdict = Verdict(
        "ok", "extension", "quick", "cuda", "real", seconds=64e-6, eager_seconds=128e-6,
        samples=[62e-6, 64e-6, 64e-6, 66e-6], bytes=134_217_728, flops=2 * 1024**3, peak_bytes_per_second=4.8e12,
        peak_flops=67e12, checks=5, ran=[Ran("gelu<256>", "own", 2, 0.75), Ran("aten.add", "torch", 1)],
        advice=["torch computed a part: aten.add"],
    )  # fmt: skip
    text = "\n".join(verdict_lines(verdict))
    for words in (
        "half of 4 calls between 62.5 and 65.5", "inputs and outputs of 134 MB: 2.1 TB/s, 44% of the device's peak",
        "2.15 GFLOP in the reference: 33.6 TFLOP/s, 50% of the device's peak", "ran: gelu<256> x2 (own 75%)",
        "ran: aten.add (torch)", "advice: torch computed a part: aten.add",
    ):  # fmt: skip
        assert words in text
    verdict.seconds = 2e-6
    text = "\n".join(verdict_lines(verdict))
    assert "14 times the device's peak: caches held a part" in text and "rougher arithmetic" in text
    verdict.clock, verdict.ran = "model", [Ran(f"k{i}", "own", 1) for i in range(9)]
    text = "\n".join(verdict_lines(verdict))
    assert "peak" not in text and "ran: 3 more" in text


def test_the_screen_says_what_was_kept_and_by_which_arithmetic_an_error_is_explained() -> None:
    said = {"baselines": {"eager_fp32": 2e-5}, "intervals": {}, "failed": {}, "precision": "below fp32"}
    verdict = Verdict("ok", "plan", "strict", "cpu", "real", seconds=1e-5, strict=said, cached=True)
    first, *rest = verdict_lines(verdict)
    assert first.endswith("mode strict; measured before and kept)")
    assert "its error is larger than that of fp32 arithmetic, and no baseline is as rough" in rest
    verdict.strict = said | {"baselines": {"eager_fp32": 2e-5, "eager_tf32": 1e-5}, "precision": "tf32"}
    assert "its error is that of tf32 arithmetic: compare it" in "\n".join(verdict_lines(verdict))
