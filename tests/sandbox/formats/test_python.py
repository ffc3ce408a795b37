"""The python format: KernelBench's form, one model_new.py whose Python runs free inside the jail."""

import pytest

from cuda_agent.sandbox.wire import Solution
from tests.sandbox.conftest import Running, task
from tests.sandbox.formats.test_extension import LINEAR

HONEST = """
import torch
class ModelNew(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, x):
        return x.clamp_min(0).mul_(self.scale)
"""


def solution(code: str) -> Solution:
    return Solution("python", {"model_new.py": code})


def test_a_right_solution_passes_and_its_verdict_is_advisory(running: Running) -> None:
    verdict = running.evaluate(task(), solution(HONEST))
    assert (verdict.status, verdict.message) == ("ok", "")
    assert verdict.advisory and verdict.to_json()["advisory"] and verdict.checks == 5


def test_weights_of_the_same_names_are_the_references(running: Running) -> None:
    code = LINEAR.replace("class Model(", "class ModelNew(").replace("torch.nn.Linear(width, 5)", "Late(width, 5)")
    late = "class Late(torch.nn.Linear):\n    def reset_parameters(self):\n        self.weight.data.zero_()\n"
    code = code.replace("class ModelNew(", late + "\n\nclass ModelNew(").replace("self.bias", "self.bias")
    assert running.evaluate(task(LINEAR, "linear"), solution(code)).status == "ok"


def test_weights_under_other_names_are_built_from_the_same_random_numbers(running: Running) -> None:
    code = LINEAR.replace("class Model(", "class ModelNew(").replace("self.linear", "self.renamed")
    assert running.evaluate(task(LINEAR, "linear"), solution(code)).status == "ok"


TUPLES = """
import torch
class Model(torch.nn.Module):
    def __init__(self, kernel_size, more, names):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 3, kernel_size)
    def forward(self, x, axes):
        return self.conv(x).mean(axes)
def get_inputs():
    return [torch.randn(2, 2, 8, 8), (2, 3)]
def get_init_inputs():
    return [(3, 5), [1, (2, [3])], {"a": (4,)}]
"""


@pytest.mark.parametrize("more", ["", " # triton"])  # with a first pass
def test_arguments_that_are_tuples_stay_tuples(running: Running, more: str) -> None:
    checks = "assert kernel_size == (3, 5) and more == [1, (2, [3])] and names == {'a': (4,)}"
    code = TUPLES.replace("class Model(", "class ModelNew(").replace("super()", f"{checks}{more}\n        super()")
    code = code.replace("return self", "assert axes == (2, 3)\n        return self")
    verdict = running.evaluate(task(TUPLES, "tuples"), solution(code))
    assert (verdict.status, verdict.message) == ("ok", "")


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("def broken(:", "build_error", "model_new.py:1"),
        ("import torch", "build_error", "defines no ModelNew"),
        ("import nothing_like_it", "build_error", "nothing_like_it"),
        (HONEST.replace("clamp_min(0)", "clamp_min(0.1)"), "wrong", "check 1"),
        (HONEST.replace("x.clamp_min(0).mul_(self.scale)", "x.clamp_min(0)[:4]"), "crash", "float32"),
    ],
)
def test_a_wrong_solution_is_told_what_is_wrong(running: Running, code: str, status: str, said: str) -> None:
    verdict = running.evaluate(task(), solution(code))
    assert verdict.status == status and said in verdict.message
