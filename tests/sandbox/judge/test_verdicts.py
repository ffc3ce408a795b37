"""What the judge says of honest and of broken solutions, and of broken tasks."""

from collections.abc import Callable

import pytest

from cuda_agent.errors import TaskError
from cuda_agent.sandbox.wire import Solution
from tests.sandbox.conftest import CHAIN, KERNEL, PLAN, Running, plan_solution, task


def test_a_correct_solution_is_ok_and_rewarded(running: Running) -> None:
    verdict = running.evaluate(task(), plan_solution())
    assert (verdict.status, verdict.checks, verdict.clock, verdict.device) == ("ok", 5, "model", "cpu")
    assert verdict.message == ""
    assert verdict.reward in (1, 2, 3)
    assert verdict.max_error is not None and verdict.max_error < 1e-5


def test_two_runs_under_the_model_clock_agree_bit_for_bit(running: Running, start: Callable[..., Running]) -> None:
    first = running.evaluate(task(), plan_solution())
    again = running.evaluate(task(), plan_solution())
    other = start(clock="model").evaluate(task(), plan_solution())
    assert first.to_json() == again.to_json() == other.to_json()


@pytest.mark.parametrize(
    ("kernel", "status", "words"),
    [
        (KERNEL.replace("y[i] =", "z[i] ="), "build_error", "kernels/chain.cpp:5:"),
        (KERNEL.replace("const float* x", "const double* x"), "build_error", "plan.json nodes[0]:1:"),
        (KERNEL.replace("0.0f)", "0.0f) + 0.5f"), "wrong", "check 1 of 5: output 0[32, 128]:"),
        (KERNEL.replace("i < high", "i < high && block"), "wrong", "of 4096 values are off"),
        (KERNEL.replace("y[i] =", "y[1L << 40] ="), "crash", "SIGSEGV"),
        (KERNEL.replace("for (", "for (;;) asm volatile(\"\"); for ("), "timeout", "did not finish in time"),
        (KERNEL + "void missing(); __attribute__((constructor)) void c() { missing(); }", "build_error", "undefined"),
    ],
)  # fmt: skip
def test_a_broken_kernel_gets_the_status_it_earned(running: Running, kernel: str, status: str, words: str) -> None:
    verdict = running.evaluate(task(), plan_solution(kernel))
    assert (verdict.status, verdict.reward) == (status, -1)
    assert words in verdict.message
    assert "/tmp" not in verdict.message


def test_an_exit_while_it_is_loaded_is_the_kernels_own(running: Running) -> None:
    kernel = KERNEL + "\n#include <stdlib.h>\n__attribute__((constructor)) void c() { exit(0); }"
    verdict = running.evaluate(task(), plan_solution(kernel))
    # What libraries do at an exit may hang with the loader half-way; then the limit of time ends it.
    ended = "ended itself (exit 0)" if verdict.status == "crash" else "did not finish in time"
    assert verdict.status in ("crash", "timeout") and verdict.reward == -1
    assert verdict.message == f"the solution {ended} while it was loaded"


def test_the_compiler_is_quoted_with_the_source_line_only(running: Running) -> None:
    verdict = running.evaluate(task(), plan_solution(KERNEL.replace("y[i] =", "undeclared[i] =")))
    assert verdict.message.splitlines()[0].endswith("error: 'undeclared' was not declared in this scope")
    assert verdict.message.splitlines()[1].strip().startswith("for (long i = low")
    assert len(verdict.message) < 300


def test_a_build_without_end_is_cut(start: Callable[..., Running]) -> None:
    bomb = "template <int N> struct S { S<N + 1> s[2]; S<N + 2> t; };\nS<0> s;\n#include __FILE__\n"
    verdict = start(clock="model", build_seconds=1.5).evaluate(task(), plan_solution(bomb + KERNEL))
    assert verdict.status == "build_error"


def test_memory_beyond_the_limit_kills_the_worker_only(running: Running) -> None:
    grow = (
        "static void grow() { for (;;) { char* p = (char*)malloc(1 << 24); if (!p) abort(); memset(p, 1, 1 << 24); } }"
    )
    greedy = "#include <stdlib.h>\n#include <string.h>\n" + grow + KERNEL.replace("long low", "grow(); long low")
    verdict = running.evaluate(task(), plan_solution(greedy))
    assert verdict.status == "crash"
    assert running.evaluate(task(), plan_solution()).status == "ok"


def test_a_terabyte_is_refused(running: Running) -> None:
    greedy = "#include <stdlib.h>\n" + KERNEL.replace(
        "long low", 'char* p = (char*)malloc(1L << 40); asm volatile("" : "+r"(p)); p[0] = p[1L << 39] = 1; long low'
    )
    assert running.evaluate(task(), plan_solution(greedy)).status == "crash"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import nothing_of_this_name",
            "ModuleNotFoundError: No module named 'nothing_of_this_name' (model.py line 1)",
        ),
        ("def get_inputs(:", "SyntaxError: invalid syntax (model.py line 1)"),
        (CHAIN.replace("class Model", "class Other"), "the task defines no Model"),
        pytest.param(
            CHAIN + "\nimport time\ntime.sleep(1000)", "the task did not finish in time", marks=pytest.mark.nightly
        ),
        (CHAIN.replace("torch.randn(32, 128)", "torch.empty(1 << 38)"), "out of memory"),
        (CHAIN.replace("[1.5]", "[1.5, 2]"), "TypeError:"),
        (CHAIN + "\nimport os\nos._exit(0)", "the task ended itself (exit 0)"),
        (CHAIN.replace("torch.relu(x)", "x.relu_()"), "changes its inputs"),
    ],
)
def test_a_task_that_cannot_run_is_named_in_one_line(running: Running, code: str, words: str) -> None:
    probe = running.probe(task(code))
    assert words in probe.error
    assert "\n" not in probe.error
    with pytest.raises(TaskError) as caught:
        running.evaluate(task(code), plan_solution())
    assert words in str(caught.value)


def test_probe_sees_what_synthesis_filters(running: Running) -> None:
    probe = running.probe(task())
    assert (probe.error, probe.deterministic, probe.lets_through) == ("", True, {})
    assert probe.inputs[0].shape == (32, 128) and probe.outputs[0].dtype == "float32"
    assert probe.eager_seconds is not None and probe.eager_seconds > 0
    assert not running.probe(task(CHAIN.replace("torch.relu(x)", "torch.rand_like(x)"))).deterministic


def test_integer_inputs_weights_and_several_outputs_reach_the_kernel(running: Running) -> None:
    code = """
import torch
class Model(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.table = torch.nn.Embedding(rows, 8)
        self.register_buffer("count", torch.tensor([3], dtype=torch.int64))
    def forward(self, ids, gain):
        return self.table(ids) * gain, ids + self.count
def get_inputs():
    return [torch.randint(0, 10, (6, 7)), 0.5]
def get_init_inputs():
    return [10]
"""
    kernel = """
void gather(long, long, const long* ids, const float* table, double gain, const long* count, float* y, long* z, long n,
            long d) {
  for (long i = 0; i < n; i++) {
    for (long j = 0; j < d; j++) y[i * d + j] = table[ids[i] * d + j] * gain;
    z[i] = ids[i] + count[0];
  }
}
"""
    args = ["in0", "w:table.weight", "in1", "w:count", "out0", "out1", "in0.numel", "w:table.weight.shape[1]"]
    plan = {"nodes": [{"kernel": "kernels/chain.cpp", "function": "gather", "args": args}]}
    verdict = running.evaluate(task(code), plan_solution(kernel, plan))
    assert (verdict.status, verdict.message) == ("ok", "")


def test_workspaces_memsets_and_templates(running: Running) -> None:
    kernel = """
template <int W>
void add(long block, long grid, const float* x, float* sum, long n) {
  for (long i = block * W; i < n && i < (block + 1) * W; i++) sum[i] += x[i] > 0 ? x[i] : 0;
}
void scale(long, long, const float* sum, float* y, const float* one, long n, double s) {
  for (long i = 0; i < n; i++) y[i] = sum[i] * s * one[0];
}
"""
    plan = {
        "workspaces": {"sum": {"size": "in0.numel"}, "one": {"size": 1, "init": 1.0}},
        "guards": ["in0.shape[1] % 64 == 0"],
        "nodes": [
            {"memset": "sum", "value": 0},
            {
                "kernel": "kernels/chain.cpp", "function": "add<512>", "grid": "cdiv(in0.numel, 512)",
                "args": ["in0", "sum", "in0.numel"],
            },
            {"kernel": "kernels/chain.cpp", "function": "scale", "args": ["sum", "out0", "one", "in0.numel", "init0"]},
        ],
    }  # fmt: skip
    verdict = running.evaluate(task(), plan_solution(kernel, plan))
    assert (verdict.status, verdict.message) == ("ok", "")


@pytest.mark.nightly
def test_a_real_time_is_measured_and_the_verdict_cached(timed: Running) -> None:
    solution = plan_solution(KERNEL + "// nobody else's\n")  # tests run in any order, and share the cache
    verdict = timed.evaluate(task(), solution)
    assert verdict.status == "ok"
    assert verdict.seconds and verdict.eager_seconds and verdict.compile_seconds
    assert verdict.samples and {"build", "start", "check", "time"} <= set(verdict.phases) and not verdict.cached
    again = timed.evaluate(task(), solution)
    assert again.cached and again.seconds == verdict.seconds
    anew = timed.evaluate(task(), solution, again=True)
    assert not anew.cached and anew.samples != verdict.samples
    assert timed.evaluate(task(), solution).seconds == anew.seconds
    assert timed.evaluate(task(), Solution("plan", {**plan_solution().files, "note.txt": "x"})).cached is False


@pytest.mark.nightly
def test_the_probe_compiles_once_for_filter_and_baseline(start: Callable[..., Running]) -> None:
    running = start(clock="real")
    probe = running.probe(task(), compile=True)
    assert probe.error == "" and probe.compile_seconds is not None
    again = running.probe(task(), compile=True)
    assert again.compile_seconds == probe.compile_seconds


def test_a_lost_judge_is_no_fault_of_the_candidate(start: Callable[..., Running]) -> None:
    running = start(clock="model")
    assert running.evaluate(task(), plan_solution()).status == "ok"
    handle = running.sandbox._judges[0]
    assert handle._process is not None
    handle._process.kill()
    assert running.evaluate(task(), plan_solution(KERNEL + "// again")).status == "ok"


def test_a_plan_that_names_no_output_is_refused(running: Running) -> None:
    plan = {"nodes": [dict(PLAN["nodes"][0], args=["in0", "in0", "in0.numel", "init0"])]}
    verdict = running.evaluate(task(), plan_solution(plan=plan))
    assert (verdict.status, verdict.message) == ("build_error", "no node uses out0")


@pytest.mark.nightly
def test_inputs_that_cannot_be_shuffled_are_drawn_anew_for_every_timed_call(timed: Running) -> None:
    """Indices have an order that may matter, so each call gets its own: remembering contents is no help."""
    code = CHAIN.replace("torch.randn(32, 128)", "torch.randint(0, 9, (64,))").replace("torch.relu(x)", "x")
    kernel = """
void times(long, long, const long* x, float* y, long n, double s) {
  static const long* seen[64];
  static int count = 0;
  for (int i = 0; i < count; i++) {
    bool equal = true;
    for (long j = 0; j < n; j++) equal = equal && seen[i][j] == x[j];
    if (equal) return;
  }
  long* copy = new long[n];
  for (long i = 0; i < n; i++) copy[i] = x[i];
  seen[count++] = copy;
  for (long i = 0; i < n; i++) y[i] = x[i] * s;
}
"""
    args = ["in0", "out0", "in0.numel", "init0"]
    plan = {"nodes": [{"kernel": "kernels/chain.cpp", "function": "times", "args": args}]}
    timed.know_compile_time(task(code))
    verdict = timed.evaluate(task(code), plan_solution(kernel, plan))
    assert (verdict.status, verdict.message) == ("ok", "")
