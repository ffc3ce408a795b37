"""What a worker's end means for its candidate, and when its times are clear."""

import math

import numpy
import pytest

from cuda_agent.sandbox.jail.processes import WorkerDied, WorkerError
from cuda_agent.sandbox.judge.decisions import (
    LOADING,
    Interval,
    is_clear,
    is_undecided,
    quotient,
    refusal,
    scale_baselines,
    share_of,
    spread,
)
from cuda_agent.sandbox.wire import Verdict


def broken(cheat: bool) -> WorkerError:
    error = WorkerError("no")
    error.cheat = cheat
    return error


@pytest.mark.parametrize("error", [WorkerDied("crash", "ended itself"), broken(True)])
def test_before_the_solution_is_loaded_the_fault_is_ours_and_tried_again(error: WorkerDied | WorkerError) -> None:
    found = refusal(error, loaded=False, when="")
    assert (found.status, found.retryable) == ("infra", True) and "before the solution was loaded" in str(found)


@pytest.mark.parametrize(
    ("error", "when", "status", "retryable", "message"),
    [
        (
            WorkerDied("timeout", "did not finish"),
            "in check 1",
            "timeout",
            False,
            "the solution did not finish in check 1",
        ),
        (WorkerDied("memory", "used"), LOADING, "crash", False, f"the solution used {LOADING}"),
        (WorkerDied("killed", "was ended"), "", "crash", True, "the solution was ended"),
        (broken(False), LOADING, "build_error", False, "no"),
        (broken(True), "in check 2", "cheat", False, "no in check 2"),
        (broken(False), "in check 2", "crash", False, "no in check 2"),
    ],
)
def test_every_end_of_a_loaded_solution_has_its_status(
    error: WorkerDied | WorkerError, when: str, status: str, retryable: bool, message: str
) -> None:
    found = refusal(error, True, when)
    assert (found.status, found.retryable, str(found)) == (status, retryable, message)


@pytest.mark.parametrize(
    ("speedups", "clear", "undecided"),
    [
        ([(1.9, 2.1)], True, False),
        ([(0.5, 0.9)], True, False),  # slower is clear, too
        ([(1.9, 2.1), (1.0, 1.08)], False, False),  # clear of eager, near torch.compile
        ([(1.0, 1.15)], False, False),  # nearly exactly 5 % faster: the median decides
        ([(0.8, 1.5)], False, True),
        ([(1.9, 2.1), (0.8, 1.5)], False, True),
        ([(1.2, 12.0)], True, False),  # far apart, and both above the bound
    ],
)
def test_calls_that_disagree_about_the_reward_are_undecided(
    speedups: list[Interval], clear: bool, undecided: bool
) -> None:
    assert (is_clear(speedups), is_undecided(speedups, (1.0, 1.5, 2.0))) == (clear, undecided)
    assert not is_undecided(speedups, (1.0, 1.05, 1.1)), "eager's calls agree: the candidate's own disagree"


def test_the_interval_of_a_median_leaves_out_what_the_sign_test_allows() -> None:
    assert spread([3.0]) == (3.0, 3.0, 3.0)
    assert spread([5.0, 1.0, 3.0]) == (1.0, 3.0, 5.0)
    assert spread(range(8)) == (0, 3.5, 7)
    assert spread(range(9)) == (1, 4, 7)
    assert spread(range(12)) == (2, 5.5, 9)
    assert spread([1.0] * 10 + [50.0] * 2) == (1.0, 1.0, 1.0)


def test_the_intervals_hold_what_they_should_nineteen_times_in_twenty() -> None:
    generator = numpy.random.default_rng(0)
    mine, others, parts = generator.exponential(size=(3, 2000, 12))  # the median is log 2
    spreads = [[spread(row) for row in rows.tolist()] for rows in (mine, others, parts)]
    held = [low <= numpy.log(2) <= high for low, _, high in spreads[0]]
    assert numpy.mean(held) > 0.95
    intervals = [quotient(over, under=under) for under, over, _ in zip(*spreads, strict=True)]
    assert numpy.mean([low <= 1 <= high for low, high in intervals]) > 0.95
    products = [quotient(over, part, under=under) for under, over, part in zip(*spreads, strict=True)]
    assert numpy.mean([low <= numpy.log(2) <= high for low, high in products]) > 0.95


def test_independent_errors_add_as_squares() -> None:
    low, high = quotient((1.0, 2.0, 4.0), under=(0.5, 1.0, 2.0))
    assert low == pytest.approx(2 / 2 ** math.sqrt(2)) and high == pytest.approx(2 * 2 ** math.sqrt(2))
    assert share_of([2.0, 1.0, 4.0], [4.0, 4.0, 4.0]) == pytest.approx((0.25, 0.5, 1.0))


def test_a_slow_anchor_of_a_busy_moment_does_not_make_a_solution_fast() -> None:
    """Eager's own code: both take 1 s, and two of five calls of eager met another program."""
    anchor = spread([1.0, 6.0, 1.0, 7.0, 1.0])
    speedup = quotient(anchor, under=spread([1.0, 1.01, 0.99, 1.0, 1.0]))
    assert speedup[0] < 1 < speedup[1] and is_undecided([speedup], anchor)


def test_all_baselines_scale_alike() -> None:
    verdict = Verdict("ok", "plan", "strict", "cuda", "real", seconds=1.0, eager_seconds=4.0, compile_seconds=2.0)
    verdict.strict = {"baselines": {"eager_fp32": 4.0}, "intervals": {"eager_fp32": [3.0, 5.0]}}
    verdict.interval = [3.0, 5.0]
    scale_baselines(verdict, 0.5)
    assert (verdict.seconds, verdict.eager_seconds, verdict.compile_seconds) == (1.0, 2.0, 1.0)
    assert verdict.strict == {"baselines": {"eager_fp32": 2.0}, "intervals": {"eager_fp32": [1.5, 2.5]}}
    assert (verdict.interval, verdict.compile_interval) == ([1.5, 2.5], None)
