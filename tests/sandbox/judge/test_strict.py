"""Strict mode: inputs of many kinds, errors beside eager's, intervals; and the arithmetic behind it."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_args

import numpy
import pytest
import torch

from cuda_agent.config import InputKind, SandboxConfig
from cuda_agent.errors import TaskError
from cuda_agent.sandbox.judge import prepared, strict
from cuda_agent.sandbox.judge.memory import host
from cuda_agent.sandbox.judge.prepared import PoolEntry
from cuda_agent.sandbox.wire import KINDS, Solution, Tensor, Verdict
from cuda_agent.sandbox.worker.values import input_kinds
from tests.sandbox.conftest import KERNEL, Running, plan_solution, task
from tests.sandbox.judge.fakes import Pool, Reference, settings_in

CLAMPED = KERNEL.replace("std::max(x[i], 0.0f)", "std::min(std::max(x[i], 0.0f), 6.0f)")
LOG = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.log(x) + x.softmax(-1)
def get_inputs():
    return [torch.rand(64, 32) + 0.1]
def get_init_inputs():
    return []
"""


def test_a_failure_at_one_precision_leaves_the_model_at_its_default(tmp_path: Any, monkeypatch: Any) -> None:
    """The prepared task is kept, and judges later solutions."""
    monkeypatch.setattr(prepared, "ReferenceClient", Reference)
    made = prepared.PreparedTask("", "d", Pool(settings_in(tmp_path, clock="real")))  # type: ignore[arg-type]

    def fails(*_: Any, **__: Any) -> Any:
        raise TaskError("out of memory")

    monkeypatch.setattr(made, "samples", fails)
    with pytest.raises(TaskError):
        strict.strict_baselines(made)
    assert made.oracle.precisions == ["fp32", "default"]  # type: ignore[attr-defined]


def judged(running: Running, code: str, solution: Solution) -> Verdict:
    return running.wait(running.sandbox.evaluate(task(code) if code else task(), solution, "strict"))


def test_a_right_solution_is_checked_on_every_kind_and_its_error_stands_beside_eagers(running: Running) -> None:
    verdict = judged(running, "", plan_solution())
    assert (verdict.status, verdict.message) == ("ok", "")
    assert verdict.strict and set(verdict.strict["kinds"]) == set(KINDS)
    assert verdict.checks == verdict.strict["inputs"] == 10
    assert verdict.strict["repeatable"]
    assert verdict.strict["error"] <= 1e-6 and verdict.strict["eager_error"] <= 1e-6


def test_what_is_right_for_normal_inputs_only_is_found(running: Running) -> None:
    """Clamped at 6: a normal input of a few thousand values never gets there."""
    assert running.evaluate(task(), plan_solution(CLAMPED)).status == "ok"
    verdict = judged(running, "", plan_solution(CLAMPED))
    assert verdict.status == "wrong"
    assert "'shifted'" in verdict.message or "'large'" in verdict.message


def test_quick_mode_checks_the_kinds_of_the_settings_too(start: Callable[..., Running]) -> None:
    careful = start(clock="model", input_kinds=["ramp", "large"])
    verdict = careful.evaluate(task(), plan_solution(CLAMPED))
    assert verdict.status == "wrong" and verdict.message.startswith("inputs of the kind 'large': ")
    for _ in range(2):  # the second candidate gets the same inputs
        verdict = careful.evaluate(task(), plan_solution())
        assert (verdict.status, verdict.message, verdict.checks) == ("ok", "", SandboxConfig().checks + 2)


VARIANCE = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.var(torch.erf(torch.cos(x + 0.1)), 0)
def get_inputs():
    return [torch.randn(1000, 4096)]
def get_init_inputs():
    return []
"""
ONE_PASS = """
import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        v, n = torch.erf(torch.cos(x + 0.1)), x.shape[0]
        result = ((v * v).sum(0) - v.sum(0) ** 2 / n) / (n - 1)
        return result
"""


def test_a_variance_of_equal_values_may_differ_from_zero_by_rounding(start: Callable[..., Running]) -> None:
    careful = start(clock="model", input_kinds=["boundary"])  # all values are 0 but the last one
    verdict = careful.evaluate(task(VARIANCE), Solution("python", {"model_new.py": ONE_PASS}))
    assert (verdict.status, verdict.message) == ("ok", "")
    for changed in ("result * (x[0, 0] != 0)", "result + 1e-3 * (x[0, 0] == 0)"):
        cheat = ONE_PASS.replace("return result", f"return {changed}")
        verdict = careful.evaluate(task(VARIANCE), Solution("python", {"model_new.py": cheat}))
        assert verdict.status == "wrong" and "boundary" in verdict.message, changed


def test_quick_mode_leaves_out_a_kind_that_the_task_does_not_have(start: Callable[..., Running]) -> None:
    careful = start(clock="model", input_kinds=["negative"])
    code = LOG.replace("class Model(", "class ModelNew(").partition("def get_inputs")[0]
    verdict = careful.evaluate(task(LOG), Solution("python", {"model_new.py": code}))
    assert (verdict.status, verdict.message, verdict.checks) == ("ok", "", SandboxConfig().checks)


def test_the_settings_name_every_kind_but_the_normal_one() -> None:
    assert ("normal", *get_args(InputKind)) == KINDS


def test_kinds_keep_to_the_domain_of_the_tasks_inputs(running: Running) -> None:
    code = LOG.replace("class Model(", "class ModelNew(").partition("def get_inputs")[0]
    verdict = judged(running, LOG, Solution("python", {"model_new.py": code}))
    assert (verdict.status, verdict.message) == ("ok", "")
    assert verdict.strict and "negative" in verdict.strict["skipped"]


def test_a_strict_time_has_an_interval_and_baselines(timed: Running) -> None:
    verdict = judged(timed, "", plan_solution())
    assert (verdict.status, verdict.message) == ("ok", "")
    assert verdict.strict and verdict.speedup_eager
    assert verdict.interval and verdict.strict["intervals"].keys() == verdict.strict["baselines"].keys()
    low, high = verdict.interval
    assert low <= verdict.speedup_eager * 1.0001 and verdict.speedup_eager <= high * 1.0001
    if compiled := verdict.compile_interval:
        assert verdict.speedup_compile and compiled[0] < verdict.speedup_compile < compiled[1]
    assert {"eager_fp32", "compile_fp32", "max_autotune_fp32"} <= {
        *verdict.strict["baselines"],
        *verdict.strict["failed"],
    }
    assert verdict.strict["precision"] == "fp32"
    assert len(verdict.samples) >= 12


def test_against_eager_alone_nothing_is_compiled_and_other_verdicts_stay_apart(
    timed: Running, start: Callable[..., Running]
) -> None:
    alone = start(timed.sandbox.cache.parent, compiled=False, clock="real", timed_calls=5, memory_mb=400)
    for mode in ("quick", "strict"):
        verdict = alone.evaluate(task(), plan_solution(), mode=mode)
        assert verdict.status == "ok" and verdict.speedup_eager, verdict.message
        assert verdict.compile_seconds is None and verdict.speedup_compile is None and verdict.interval
    assert [*verdict.strict["baselines"]] == ["eager_fp32"] and not verdict.strict["failed"]
    assert timed.evaluate(task(), plan_solution()).compile_seconds, "it is no verdict of the other kind"


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_keeps_shape_dtype_and_range(kind: str) -> None:
    torch.manual_seed(0)
    normal, positive, unit = torch.randn(8, 16), torch.rand(8, 16) * 5 + 2, torch.rand(8, 16)
    labels = torch.randint(0, 9, (8,))
    for tensor in (normal, positive, unit):
        varied = input_kinds.vary([tensor.clone(), labels], kind)
        if varied is None:
            continue
        assert varied[0].shape == tensor.shape and varied[0].dtype == tensor.dtype
        assert torch.isfinite(varied[0]).all() and torch.equal(varied[1], labels)
        if tensor is positive:
            assert float(varied[0].min()) > 0
        if tensor is unit:
            assert float(varied[0].min()) >= 0 and float(varied[0].max()) <= 1


def test_integers_have_no_other_kinds() -> None:
    assert input_kinds.vary([torch.arange(9)], "large") is None


def test_the_interval_holds_the_ratio_and_narrows() -> None:
    few, many = [1.0, 1.1, 0.9] * 4, [1.0, 1.1, 0.9] * 100
    wide = strict.interval(few, [2 * value for value in reversed(few)])
    tight = strict.interval(many, [2 * value for value in reversed(many)])
    assert wide[0] <= 2 <= wide[1] and tight[0] <= 2 <= tight[1]
    assert tight[1] - tight[0] <= wide[1] - wide[0]


@pytest.mark.parametrize(
    ("own", "name"), [(2e-7, "fp32"), (3e-4, "tf32"), (3e-3, "bf16"), (math.inf, "below bf16"), (0.0, "fp32")]
)
def test_an_error_names_the_arithmetic_that_explains_it(own: float, name: str) -> None:
    assert strict.precision_of(own, {"fp32": 1.5e-7, "tf32": 2.9e-4, "bf16": 2.4e-3}) == name
    assert strict.precision_of(own, {}) == ""


@pytest.mark.nightly
def test_baselines_are_compiled_in_both_modes(start: Callable[..., Running]) -> None:
    verdict = judged(start(clock="real"), "", plan_solution())
    assert verdict.strict and {"eager_fp32", "compile_fp32", "max_autotune_fp32"} == set(verdict.strict["baselines"])


def excused(
    wanted: list[Any], exact: list[Any], have: list[Any], dtypes: tuple[str, ...], tf32: list[Any] | None = None,
    usual: list[Any] | None = None,
) -> bool:  # fmt: skip
    """Whether strict mode accepts ``have``. ``tf32`` are eager's outputs at this precision (default: ``wanted``), and
    ``usual`` the outputs for normal inputs."""
    tensors = tuple(Tensor(value.shape, dtype) for value, dtype in zip(wanted, dtypes, strict=True))
    task: Any = SimpleNamespace(
        memory=host, spec=SimpleNamespace(outputs=tensors), settings=SimpleNamespace(device="cuda" if tf32 else "cpu"),
        outputs_at=lambda inputs, precision: tf32 if tf32 and precision == "tf32" else wanted,
        varied=lambda kind: usual and PoolEntry(-1, [], usual, usual),
    )  # fmt: skip
    return strict._only_rounding(task, PoolEntry(-1, [], wanted, exact), have, 1e-2)


def test_only_floating_outputs_that_are_as_good_as_eagers_are_excused() -> None:
    random = numpy.random.default_rng(0)
    exact = random.standard_normal(1000)
    eager = (exact + 0.1 * random.standard_normal(1000)).astype("f4")  # large terms cancel out
    as_good = (exact + 0.1 * random.standard_normal(1000)).astype("f4")
    worse = (exact + random.standard_normal(1000)).astype("f4")
    assert excused([eager], [exact], [as_good], ("float32",)) and not excused([eager], [exact], [worse], ("float32",))
    places, none = numpy.arange(1000), numpy.zeros(1000, int)
    both = ("float32", "int64")
    assert excused([eager, places], [exact, places], [as_good, places], both)
    assert not excused([eager, places], [exact, places], [as_good, none], both), "an index has no rounding"
    assert not excused([none], [none], [places], ("int64",))


def test_rounding_is_excused_where_outputs_are_far_smaller_than_usual() -> None:
    usual, exact = [numpy.random.default_rng(0).random(1000)], [numpy.zeros(1000)]
    wanted = [numpy.zeros(1000, "f4")]

    def accepts(error: float, usual: list[Any] | None = usual) -> bool:
        have = wanted[0].copy()
        have[7] = error
        return excused(wanted, exact, [have], ("float32",), usual=usual)

    assert accepts(6e-8), "the rounding of a variance of equal values"
    assert not accepts(1e-3) and not accepts(math.nan) and not accepts(math.inf)
    assert not accepts(6e-8, [1e-5 * usual[0]]) and not accepts(6e-8, None)


def test_a_small_output_is_not_excused_by_the_error_of_a_large_one() -> None:
    exact = [numpy.full(1000, 1e3), numpy.array(0.5)]
    eager = [exact[0].astype("f4") * numpy.float32(1 + 1e-6), numpy.array(0.5, "f4")]
    assert not excused(eager, exact, [eager[0], numpy.array(0.53, "f4")], ("float32", "float32"))


def test_tf32_excuses_only_what_eager_in_tf32_gets_wrong_too() -> None:
    exact = numpy.random.default_rng(0).standard_normal(1_000_000)
    eager = exact.astype("f4")
    tf32 = (exact * (1 + 5e-4)).astype("f4")
    zeroed = eager.copy()
    zeroed[7] = 0
    assert strict._relative([host.distance(zeroed, exact, Tensor(zeroed.shape, "float32"))]) < 4 * 5e-4
    assert not excused([eager], [exact], [zeroed], ("float32",), [tf32])
