"""What a worker's end means for its candidate, and when its times are clear."""

import pytest

from cuda_agent.sandbox.jail.processes import WorkerDied, WorkerError
from cuda_agent.sandbox.judge.decisions import LOADING, is_clear, refusal, scale_baselines
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
    ("samples", "anchors", "compile_share", "clear"),
    [
        ([1.0] * 5, [2.0] * 5, None, True),
        ([1.9] * 5, [2.0] * 5, None, False),  # exactly 5 % faster
        ([1.0] * 5, [2.0] * 5, 0.5263, False),  # clear of eager, not of torch.compile
        ([0.5, 1.0, 1.5], [2.0] * 3, None, False),  # far away, and too noisy
        ([3.0] * 5, [2.0] * 5, 0.9, True),  # slower is clear, too
    ],
)
def test_times_are_clear_where_more_calls_change_no_comparison(
    samples: list[float], anchors: list[float], compile_share: float | None, clear: bool
) -> None:
    assert is_clear(samples, anchors, compile_share) == clear


def test_all_baselines_scale_alike() -> None:
    verdict = Verdict("ok", "plan", "strict", "cuda", "real", seconds=1.0, eager_seconds=4.0, compile_seconds=2.0)
    verdict.strict = {"baselines": {"eager_fp32": 4.0}, "interval": [3.0, 5.0]}
    scale_baselines(verdict, 0.5)
    assert (verdict.seconds, verdict.eager_seconds, verdict.compile_seconds) == (1.0, 2.0, 1.0)
    assert verdict.strict == {"baselines": {"eager_fp32": 2.0}, "interval": [1.5, 2.5]}
