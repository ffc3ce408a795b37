"""The triton format on the CPU: Triton's interpreter checks correctness, and no time is taken."""

import ast
import importlib.util

import pytest

from cuda_agent.agent.tools import describe
from cuda_agent.errors import SandboxUnready
from cuda_agent.exploits.cases.triton import EXPLOITS, HONEST, KERNEL
from cuda_agent.exploits.records import python
from cuda_agent.optimize.verdict_text import verdict_lines
from cuda_agent.sandbox.formats.triton import UNTIMED, kernels
from cuda_agent.sandbox.wire import Solution
from tests.sandbox.conftest import Running, task

LAUNCH = "return launch(x, self.scale)"


def solution(forward: str = LAUNCH, kernel: str = KERNEL, init: str = "") -> Solution:
    return Solution("triton", dict(python(forward, kernel, init)))


def test_a_right_solution_is_correct_and_gets_no_time(timed: Running) -> None:
    verdict = timed.evaluate(task(), solution())
    assert (verdict.status, verdict.message, verdict.checks) == ("ok", "", 5)
    assert verdict.untimed == UNTIMED and not verdict.advisory
    assert verdict.seconds is verdict.eager_seconds is verdict.compile_seconds is None and verdict.samples == []
    assert verdict.reward == 1
    assert UNTIMED in describe(verdict, "profile", "compact")
    assert f"not timed: {UNTIMED}" in verdict_lines(verdict)


def test_strict_mode_checks_and_takes_no_time(running: Running) -> None:
    verdict = running.wait(running.sandbox.evaluate(task(), solution(), "strict"))
    assert (verdict.status, verdict.message) == ("ok", "")
    assert verdict.strict and "normal" in verdict.strict["kinds"] and verdict.seconds is None
    assert [(ran.name, ran.kind) for ran in verdict.ran] == [("scaled_relu", "own")]
    assert not [line for line in verdict.advice if "seen to run" in line or "torch computed" in line]


@pytest.mark.parametrize(
    ("kernel", "forward", "status", "said"),
    [
        (KERNEL, "return torch.relu(x) * self.scale", "cheat", "calls torch.relu"),
        (KERNEL, "launch(x, self.scale)\nreturn x.mul(2)", "cheat", "torch.Tensor.mul"),
        (KERNEL, "return torch.empty_like(x)", "cheat", "launches no kernel"),
        (KERNEL, "return launch(x, 2 * self.scale)", "wrong", "check 1 of 5"),
        (KERNEL.replace("0.0) * s", "0.0) * missing"), LAUNCH, "crash", "missing"),
        (KERNEL.replace("@triton.jit", ""), LAUNCH, "build_error", "@triton.jit"),
        ("import torch", "return x", "build_error", "@triton.jit"),
        ("def (", "return x", "build_error", "model_new.py:"),
        (f"@a{'.b' * 900}\ndef f(): pass\n{KERNEL}", LAUNCH, "build_error", "nested too deep"),
    ],
)  # fmt: skip
def test_what_is_refused_and_why(running: Running, kernel: str, forward: str, status: str, said: str) -> None:
    verdict = running.evaluate(task(), solution(forward, kernel))
    assert (verdict.status, said in verdict.message) == (status, True), verdict.message


def test_autotuning_takes_the_first_configuration(running: Running) -> None:
    tuned = KERNEL.replace(
        "@triton.jit\ndef scaled_relu",
        "@triton.autotune([triton.Config({'BLOCK': b}) for b in (512, 1024)], key=['n'])\n@triton.jit\ndef scaled_relu",
    ).replace("1024),)](x, y, x.numel(), s, BLOCK=1024)", "512),)](x, y, x.numel(), s)")
    forward = "y = launch(x, self.scale)\nassert scaled_relu.best_config.kwargs == {'BLOCK': 512}\nreturn y"
    verdict = running.evaluate(task(), solution(forward, tuned))
    assert (verdict.status, verdict.message) == ("ok", "")


def test_without_the_package_the_sandbox_says_so(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SandboxUnready, match=r"needs the package triton: pip install triton$"):
        running.evaluate(task(), solution("return launch(x, self.scale + 0)"))


@pytest.mark.parametrize(
    ("head", "decorator", "found"),
    [
        ("import triton", "triton.jit", True),
        ("import triton as t", "t.jit()", True),
        ("from triton import jit as compiled", "compiled", True),
        ("from triton.runtime.jit import jit", "jit(do_not_specialize=['n'])", True),
        ("import torch", "torch.jit.script", False),
        ("from numba import jit", "jit", False),
        ("", "triton.jit", False),
    ],
)
def test_kernels_are_found_under_any_name_of_the_decorator(head: str, decorator: str, found: bool) -> None:
    tree = ast.parse(f"{head}\n@{decorator}\ndef kernel(n):\n    pass\n")
    assert list(kernels(tree)) == (["kernel"] if found else [])


def test_the_suite_has_honest_solutions_and_exploits() -> None:
    assert len(HONEST) >= 8 and len(EXPLOITS) >= 8
    assert {"triton_softmax", "triton_matmul", "triton_autotuned"} <= HONEST.keys()
