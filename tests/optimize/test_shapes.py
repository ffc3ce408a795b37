"""Other shapes of a task: which there are, and what a specialised solution gets."""

import json

import pytest

from cuda_agent.errors import ConfigError
from cuda_agent.optimize.shapes import ShapeResult, judge_shapes, shape_lines, variants
from cuda_agent.sandbox.wire import Solution
from tests.sandbox.conftest import CHAIN, KERNEL, PLAN, Running, plan_solution, task
from tests.sandbox.conftest import running as running

SIZED = """
import torch
import torch.nn as nn

rows, width = 32, 8
dim: int = (
    16 * 8
)
half = dim // 2

class Model(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return torch.relu(x) * self.weight

def get_inputs():
    return [torch.randn(half, dim)]

def get_init_inputs():
    return [1.5]
"""


def test_a_constant_is_changed_where_it_is_set_and_others_follow() -> None:
    [variant] = variants(task(SIZED), ["dim=100"])
    assert variant.name == "dim=100"
    scope: dict = {}
    exec(variant.task.code, scope)
    assert scope["get_inputs"]()[0].shape == (50, 100)


def test_two_constants_of_one_line_are_both_changed() -> None:
    one_line = SIZED.replace("half = dim // 2", "a = 1; b = 2; half = dim // 2")
    for asked in ("a=1000, b=3", "b=3, a=1000"):
        assert "a = 1000; b = 3; half" in variants(task(one_line), [asked])[0].task.code


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("width=2", "no constant width; it sets: dim, half"),
        ("dim=rows", "expected auto, or constants"),
        ("dim", "expected auto"),
        ("), print(1", "expected auto"),
        ("**{'dim': 1}", "no constant None"),
    ],
)
def test_what_cannot_be_changed_is_said(asked: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        variants(task(SIZED), [asked])


def test_auto_means_the_tasks_own_shapes_or_the_first_dimension() -> None:
    declared = SIZED + "\nSHAPES = [{'dim': 64}, {'dim': 7}]\n"
    assert [variant.name for variant in variants(task(declared), ["auto"])] == ["dim=64", "dim=7"]
    found = variants(task(CHAIN), ["auto"])
    assert [variant.name for variant in found] == ["first dimension + 1", "first dimension / 2"]
    sizes = []
    for variant in found:
        scope: dict = {}
        exec(variant.task.code, scope)
        sizes.append(tuple(scope["get_inputs"]()[0].shape))
    assert sizes == [(33, 128), (16, 128)]
    with pytest.raises(ConfigError, match="expected a list of dicts"):
        variants(task(CHAIN + "\nSHAPES = {'dim': 1}\n"), ["auto"])


def test_a_specialised_solution_is_correct_at_its_own_shape_only(running: Running) -> None:
    chain = task(CHAIN)
    special = plan_solution(
        KERNEL.replace("in0.numel", ""), json.loads(json.dumps(PLAN).replace('"in0.numel"', '"4096"'))
    )
    assert running.evaluate(chain, special).status == "ok"
    results = running.wait(judge_shapes(running.sandbox, plan_solution(), variants(chain, ["auto"])))
    assert [result.status for result in results] == ["ok", "ok"]
    results = running.wait(judge_shapes(running.sandbox, special, variants(chain, ["auto"])[:1]))
    assert [result.status for result in results] == ["wrong"], "its last row is never written"
    assert shape_lines(results)[-1] == "specialised: correct at the task's own shape, not at 1 of 1 others"


def test_a_solution_that_writes_beyond_an_output_is_specialised(running: Running) -> None:
    """The kernel works in whole steps of 256 values.  32 rows of 128 values are 16 steps, 33 rows are 16.5."""
    steps = KERNEL.replace("long low", "n = (n + 255) / 256 * 256; long low")
    chain = task(CHAIN)
    assert running.evaluate(chain, plan_solution(steps)).status == "ok"
    [result] = running.wait(judge_shapes(running.sandbox, plan_solution(steps), variants(chain, ["auto"])[:1]))
    assert (result.status, result.message) == ("crash", "the solution wrote outside of its outputs in check 1")


def test_a_shape_that_the_model_refuses_says_nothing_of_the_solution(running: Running) -> None:
    fixed = task(CHAIN.replace("torch.relu(x)", "torch.relu(x.view(32, 128))"))
    results = running.wait(judge_shapes(running.sandbox, plan_solution(), variants(fixed, ["auto"])))
    assert [result.status for result in results] == ["no task", "no task"]
    assert shape_lines(results)[-1] == "no other shape could be tried"


def test_checked_only_a_solution_has_no_times_and_waits_for_no_baseline(running: Running) -> None:
    verdict = running.wait(running.sandbox.evaluate(task(), Solution("plan", dict(plan_solution().files)), "check"))
    assert (verdict.status, verdict.seconds, verdict.eager_seconds, verdict.checks) == ("ok", None, None, 5)
    assert "only checks" in verdict.untimed


def test_lines_name_each_shape() -> None:
    lines = shape_lines([ShapeResult("dim=7", "ok", ""), ShapeResult("dim=8", "wrong", "check 1 of 5: off")])
    assert lines[:2] == ["shape dim=7: ok", "shape dim=8: wrong: check 1 of 5: off"]
    assert shape_lines([ShapeResult("dim=7", "ok", "")])[-1].startswith("not specialised")
