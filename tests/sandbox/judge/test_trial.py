"""A trial: which calls a candidate gets, and what each of its outputs decides."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from cuda_agent.sandbox.jail.processes import WorkerDied, WorkerError
from cuda_agent.sandbox.judge import prepared as prepared_tasks
from cuda_agent.sandbox.judge.decisions import TOO_BUSY, CandidateRefused
from cuda_agent.sandbox.judge.trial import Trial
from cuda_agent.sandbox.messages import WorkerOperation
from cuda_agent.sandbox.wire import FormatTraits, Verdict
from tests.sandbox.judge.fakes import LENGTH, Pool, Reference, Worker, settings_in

Make = Callable[..., Trial]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(prepared_tasks, "ReferenceClient", Reference)
    trials: list[Trial] = []

    def made(compute: Callable[[int, Any], Any] = lambda number, x: 2 * x, **settings: Any) -> Trial:
        pool: Any = Pool(settings_in(tmp_path, **settings))
        pool.worker = Worker(compute)
        task = prepared_tasks.PreparedTask("", "digest", pool)
        load = {"code": ""}
        request: Any = {
            "task": {}, "format": "python", "traits": vars(FormatTraits()), "mode": "quick", "load": load, "files": {},
            "observe": False, "again": False,
        }  # fmt: skip
        verdict = Verdict("ok", "python", "quick", "cpu", "model")
        trials.append(Trial(pool, task, request, verdict))
        pool.worker.buffers = trials[-1]._buffers
        return trials[-1]

    yield made
    for trial in trials:
        trial.close()


def refused(trial: Trial) -> tuple[str, str]:
    with pytest.raises(CandidateRefused) as refusal:
        trial.run(timed=False)
    return refusal.value.status, str(refusal.value)


def test_a_right_solution_passes_every_check_and_is_not_timed(make: Make) -> None:
    trial = make(checks=4)
    trial.run(timed=False)
    assert trial._verdict.checks == 4 and trial._verdict.max_error == 0 and trial._verdict.seconds is None
    worker: Any = trial._worker
    assert worker.operations[:2] == [WorkerOperation.MAP_BUFFERS, WorkerOperation.LOAD_SOLUTION]
    assert worker.operations[2:] == [WorkerOperation.RUN] * 4


def test_every_check_has_inputs_of_its_own(make: Make) -> None:
    seen: list[bytes] = []

    def compute(number: int, x: Any) -> Any:
        seen.append(x.tobytes())
        return 2 * x

    make(compute).run(timed=False)
    assert len(set(seen)) == len(seen) == 3


def test_a_wrong_output_is_named_with_its_check(make: Make) -> None:
    status, message = refused(make(lambda number, x: 2 * x + (number == 2)))
    assert status == "wrong" and message.startswith("check 2 of 3: ")


def test_outputs_of_an_earlier_call_are_a_cheat(make: Make) -> None:
    first: list[Any] = []

    def compute(number: int, x: Any) -> Any:
        first.append(2 * x)
        return first[0]

    status, message = refused(make(compute))
    assert status == "cheat" and "the outputs of an earlier call were given again" in message


def test_outputs_that_are_never_written_are_wrong(make: Make) -> None:
    """The buffers are poisoned before each call."""

    status, message = refused(make(lambda number, x: None))
    assert status == "wrong" and message.startswith("check 1 of 3: ")


@pytest.mark.parametrize(
    ("operation", "error", "status"),
    [
        (WorkerOperation.MAP_BUFFERS, WorkerDied("crash", "ended itself"), "infra"),
        (WorkerOperation.LOAD_SOLUTION, WorkerError("NameError: x"), "build_error"),
        (WorkerOperation.LOAD_SOLUTION, WorkerDied("timeout", "did not finish in time"), "timeout"),
        (WorkerOperation.RUN, WorkerError("RuntimeError: x"), "crash"),
    ],
)
def test_where_a_worker_fails_decides_the_status(
    make: Make, operation: WorkerOperation, error: Exception, status: str
) -> None:
    trial = make()
    worker: Any = trial._workers.candidate()
    worker.fails_at[operation] = error
    assert refused(trial)[0] == status


def test_an_audit_of_a_timed_call_refuses_more_than_the_tolerance(make: Make) -> None:
    """An error of one and a half times the tolerance, in every value."""
    trial = make()
    entry = trial._take()
    with pytest.raises(CandidateRefused) as refusal:
        trial._compare(entry, [_off(entry, 1.5, LENGTH)], "an audit", audit=True)
    assert refusal.value.status == "wrong" and "the outputs are wrong" in str(refusal.value)


def test_one_value_of_a_trial_may_be_off_by_twice_the_tolerance_while_timed(make: Make) -> None:
    trial = make()
    entry = trial._take()
    trial._compare(entry, [_off(entry, 1.5, 1)], "an audit", audit=True)
    trial._compare(entry, [entry.outputs[0] * numpy.float32(1.001)], "an audit", audit=True)
    with pytest.raises(CandidateRefused):
        trial._compare(entry, [_off(entry, 1.5, 1)], "an audit", audit=True)
    with pytest.raises(CandidateRefused):
        make()._compare(entry, [_off(entry, 2.5, 1)], "an audit", audit=True)
    with pytest.raises(CandidateRefused):
        make()._compare(entry, [_off(entry, 1.5, 1)], "check 1")


def test_a_timed_call_of_strict_mode_may_be_as_far_off_as_eager_is(make: Make) -> None:
    """The reference's own rounding takes its outputs beyond the tolerance, and the solution is exact."""
    for mode, status in (("strict", ""), ("quick", "wrong")):
        trial = make()
        trial._verdict.mode = mode  # type: ignore[assignment]
        entry = trial._take()
        right, oracle = entry.outputs[0].copy(), trial._prepared.oracle
        entry.outputs[0] = _off(entry, 1.5, LENGTH)
        oracle.outputs = lambda inputs, rounded=entry.outputs: rounded  # type: ignore[misc,method-assign]
        try:
            trial._compare(entry, [right], "an audit", audit=True)
            assert not status
        except CandidateRefused as refusal:
            assert refusal.status == status


def _off(entry: Any, times: float, count: int) -> Any:
    """The outputs with the first ``count`` values off by so many times the tolerance, which is 1e-2."""
    want = entry.outputs[0]
    allowed = 1e-2 * (min(1.0, float(numpy.sqrt((want**2).mean()))) + numpy.abs(want))
    have = want.copy()
    have[:count] += (times * allowed)[:count]
    return have


def test_a_wrong_output_of_a_timed_call_is_a_cheat(make: Make) -> None:
    trial = make()
    entry = trial._take()
    with pytest.raises(CandidateRefused) as refusal:
        trial._compare(entry, [entry.outputs[0] + numpy.float32(0.5)], "an audit", audit=True)
    assert refusal.value.status == "cheat" and "the outputs are wrong" in str(refusal.value)
    with pytest.raises(CandidateRefused) as refusal:
        trial._compare(entry, [entry.outputs[0] + numpy.float32(0.5)], "check 1")
    assert refusal.value.status == "wrong"


def test_a_trial_sees_no_input_of_an_earlier_one_even_if_it_failed_to_load(make: Make) -> None:
    """A candidate can leave traces, in the page cache for example, of what it saw."""
    trial = make(clock="real")
    trial.run(timed=False)
    used = trial._next - trial._prepared.base
    trial.end()
    trial._prepared.rotate(used)
    worker: Any = trial._worker
    assert not worker.alive and trial._prepared.base == used == 3
    trial._prepared.rotate(0)  # a worker that failed while it loaded, with the first input in its buffers
    assert trial._prepared.base == used + 1


def take(trial: Trial, monkeypatch: pytest.MonkeyPatch, took: Iterator[float], eagers: Iterator[float]) -> None:
    """Lets the candidate's calls take the seconds ``took``, and those of eager ``eagers``."""
    monkeypatch.setattr(trial, "_timed", lambda inputs: (next(took), [2 * inputs[0]]))
    monkeypatch.setattr(trial._prepared.oracle, "seconds", lambda inputs, null=False: 1.0 if null else next(eagers))


def test_calls_that_disagree_are_followed_by_more_and_then_earn_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make(clock="real", timed_calls=6)
    trial._open()
    take(trial, monkeypatch, itertools.cycle([1.0, 5.0, 1.0, 9.0]), itertools.cycle([3.0, 9.0]))
    with pytest.raises(CandidateRefused, match="too busy to tell a reward: this solution may be") as refusal:
        trial.time()
    assert refusal.value.status == "infra" and len(trial._verdict.samples) == 24
    take(trial, monkeypatch, itertools.cycle([1.0, 5.0, 1.0, 9.0]), itertools.repeat(3.0))
    trial._verdict.samples.clear()
    trial.time()
    assert len(trial._verdict.samples) == 6 and trial._verdict.advice, "its own calls disagree: the median decides"
    take(trial, monkeypatch, itertools.repeat(1.0), itertools.repeat(3.0))
    trial._verdict.samples.clear()
    trial.time()
    assert len(trial._verdict.samples) == 5 and trial._verdict.interval == [2.0, 2.0]


def test_a_reward_that_only_the_reported_time_left_open_is_decided_by_the_judges_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make(clock="real", timed_calls=6)
    trial._open()
    take(trial, monkeypatch, itertools.cycle([1.0, 5.0, 1.0, 9.0]), itertools.cycle([3.0, 9.0]))
    monkeypatch.setattr(trial, "_cross", SimpleNamespace(believe=lambda told, chain: (100 * told, "")))
    trial.time()
    assert trial._verdict.interval and trial._verdict.interval[-1] < 1


@pytest.mark.parametrize(("shared", "status"), [(True, "infra"), (False, "cheat")])
def test_a_time_that_the_clock_contradicts_accuses_only_on_a_device_without_others(
    make: Make, monkeypatch: pytest.MonkeyPatch, shared: bool, status: str
) -> None:
    trial = make(clock="real")
    trial._open()
    worker: Any = trial._worker
    cross: Any = SimpleNamespace(believe=lambda told, chain: (9 * told, "it is too fast"))
    trial._cross, trial._memory = cross, SimpleNamespace(shared=lambda peak: shared and not worker.alive)
    trial._verdict.samples.append(1e-6)
    with pytest.raises(CandidateRefused) as refusal:
        trial._believed(1e-6)
    assert refusal.value.status == status and refusal.value.retryable == (not shared)
    assert str(refusal.value).startswith(TOO_BUSY) == shared
    assert not trial._verdict.samples, "a second trial takes new times"


def test_samples_follow_the_time_that_counts(make: Make) -> None:
    trial = make(clock="real")
    trial._open()
    cross: Any = SimpleNamespace(believe=lambda told, chain: (1.5 * told, ""))
    trial._cross = cross
    trial._verdict.samples = [0.2, 0.3, 0.4]
    assert trial._believed(0.3) == pytest.approx(0.45)
    assert trial._verdict.samples == pytest.approx([0.3, 0.45, 0.6])


def test_eager_alone_is_timed_as_beside_the_candidate_without_the_time_of_an_empty_call(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make(clock="real")
    trial._open()
    take(trial, monkeypatch, itertools.repeat(1.0), itertools.repeat(2.0))  # of which an empty call takes 1.0
    trial._anchor = trial._verdict.eager_seconds = 2.0
    trial.eager_alone()
    assert trial._verdict.eager_seconds == pytest.approx(1.05)
