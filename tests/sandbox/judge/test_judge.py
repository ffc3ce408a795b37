"""The judge: which tasks stay prepared, when a candidate gets another trial, and what is measured before it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cuda_agent.errors import TaskError
from cuda_agent.sandbox import driver
from cuda_agent.sandbox.jail.processes import NotStarted
from cuda_agent.sandbox.judge import judge as judges
from cuda_agent.sandbox.judge import prepared, strict
from cuda_agent.sandbox.judge.decisions import CandidateRefused
from cuda_agent.sandbox.judge.judge import Judge
from cuda_agent.sandbox.judge.reference_client import TaskKilled
from cuda_agent.sandbox.wire import FormatTraits, Verdict
from tests.sandbox.judge.fakes import Pool, Reference, settings_in


class Trials:
    """In the place of ``Trial``: each trial does the next thing of ``script``, which a test fills."""

    def __init__(self) -> None:
        self.script: list[Exception | None] = []
        self.timed: list[bool] = []
        self.seconds: list[float] = []  # of the trials that pass, in order
        self.shared: list[bool] = []  # whether each trial got the shared context
        self.closed = 0
        self.proven = True  # whether a shared context computes correctly after a trial

    def __call__(self, workers: Any, task: Any, request: Any, verdict: Verdict, shared: Any) -> "Trials":
        self.verdict = verdict
        self.shared.append(shared is not None)
        return self

    def run(self, timed: bool) -> None:
        self.timed.append(timed)
        self.verdict.checks += 3
        if self.seconds:
            self.verdict.samples.append(self.seconds.pop(0))
        if self.script and (error := self.script.pop(0)):
            raise error
        if self.verdict.samples:
            self.verdict.seconds = self.verdict.samples[-1]

    def end(self) -> None: ...

    def give_back(self) -> bool:
        return self.proven

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    monkeypatch.setattr(judges, "Trial", found := Trials())
    return found


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: Trials) -> Iterator[Callable[..., Judge]]:
    monkeypatch.setattr(judges, "WorkerPool", Pool)
    monkeypatch.setattr(prepared, "ReferenceClient", Reference)
    made: list[Judge] = []

    def judge(**settings: Any) -> Judge:
        made.append(Judge(settings_in(tmp_path, **settings)))
        return made[-1]

    yield judge
    for one in made:
        one.close()


Make = Callable[..., Judge]


def source(name: str) -> Any:
    return {"digest": name, "code": ""}


def request(name: str = "a") -> Any:
    return {
        "task": source(name), "format": "python", "traits": vars(FormatTraits()), "mode": "quick", "load": {},
        "files": {}, "observe": False, "again": False,
    }  # fmt: skip


def test_a_task_stays_prepared_and_the_least_recently_used_goes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "_MOST_PREPARED", {"cpu": 2})
    judge = make()
    a, b = judge.prepared(source("a")), judge.prepared(source("b"))
    assert judge.prepared(source("a")) is a
    judge.prepared(source("c"))
    assert a.oracle.alive and not b.oracle.alive
    assert judge.prepared(source("b")) is not b


def test_a_prober_keeps_two_tasks_and_none_that_are_large(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = make(prober=True)
    a, b, c = (judge.prepared(source(name)) for name in "abc")
    assert (a.oracle.alive, b.oracle.alive, c.oracle.alive) == (False, True, True)
    monkeypatch.setattr(judges, "_MOST_OF_A_PROBER", c.bytes)
    d = judge.prepared(source("d"))
    assert (b.oracle.alive, c.oracle.alive, d.oracle.alive) == (False, False, True)
    judge.release()
    assert not d.oracle.alive and judge.held_bytes == 0


def test_a_prober_refuses_a_large_task_and_holds_nothing_after_a_measurement(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = make(prober=True)
    judge.measure({"task": source("a"), "mode": "quick"})
    (kept,) = judge._prepared.values()
    judge.rest(keep=True)
    assert kept.oracle.alive
    judge.rest(keep=False)
    assert not kept.oracle.alive and not judge._prepared
    monkeypatch.setattr(judges, "MOST_BESIDE", 1)
    with pytest.raises(TaskError, match="too large to run beside others"):
        judge.measure({"task": source("b"), "mode": "quick"})
    assert not judge._prepared


def test_baselines_are_measured_again_on_demand_and_not_read_from_the_cache(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(task: prepared.PreparedTask) -> None:
        task.baselines.eager, task.baselines.compile, task.baselines.compile_tried = next(times), 1.0, True

    times = iter([2.0, 3.0])
    monkeypatch.setattr(prepared.PreparedTask, "_measure_compile", measure)
    monkeypatch.setattr(prepared.PreparedTask, "samples", lambda *_: [[1.0]])
    judge = make(clock="real")
    assert judge.evaluate(request())["eager_seconds"] == judge.evaluate(request())["eager_seconds"] == 2.0
    assert judge.evaluate(request() | {"again": True})["eager_seconds"] == 3.0


def test_a_judge_takes_the_strict_baselines_that_a_prober_has_measured(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(task: prepared.PreparedTask) -> None:
        task.baselines.eager, task.baselines.compile, task.baselines.compile_tried = 2.0, 1.0, True

    def measure_at(precision: str, task: prepared.PreparedTask, entry: Any, found: dict[str, Any]) -> None:
        found["seconds"][f"eager_{precision}"] = 2.0
        measured.append(task)

    measured: list[prepared.PreparedTask] = []
    monkeypatch.setattr(prepared.PreparedTask, "_measure_compile", measure)
    monkeypatch.setattr(prepared.PreparedTask, "samples", lambda *_: [[1.0]])
    monkeypatch.setattr(strict, "_measure_at", measure_at)
    judge, prober = make(clock="real"), make(clock="real", prober=True)
    judge.evaluate(request())  # it knows those of quick mode before the prober adds the others
    prober.measure({"task": source("a"), "mode": "quick"})
    assert not measured
    prober.measure({"task": source("a"), "mode": "strict"})
    judge.evaluate(request() | {"mode": "strict"})
    assert [task.settings.prober for task in measured] == [True]


def test_prepared_tasks_are_bounded_by_their_bytes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = make()
    a = judge.prepared(source("a"))
    monkeypatch.setattr(judge.memory, "prepared_bytes", lambda: 2 * a.bytes + 1)
    b = judge.prepared(source("b"))
    assert a.oracle.alive
    c = judge.prepared(source("c"))
    assert (a.oracle.alive, b.oracle.alive, c.oracle.alive) == (False, True, True)
    monkeypatch.setattr(judge.memory, "prepared_bytes", lambda: 1)
    assert judge.prepared(source("d")).oracle.alive, "the task that is asked for stays"


def test_inputs_of_earlier_tasks_go_before_the_tasks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = make()
    a, b = judge.prepared(source("a")), judge.prepared(source("b"))
    alone = a.bytes
    for task in (a, b):
        task.entry(0)
    monkeypatch.setattr(judge.memory, "prepared_bytes", lambda: 2 * alone + b.bytes)
    c = judge.prepared(source("c"))
    assert a.oracle.alive and b.oracle.alive and c.oracle.alive
    assert a.bytes == alone < b.bytes, "the least recently used first, and no more than needed"


def test_tasks_go_until_the_next_candidate_finds_room_on_the_device(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, trimmed = make(), []
    a, b = judge.prepared(source("a")), judge.prepared(source("b"))
    needs = a.candidate_bytes
    monkeypatch.setattr(judge.memory, "trim", lambda: trimmed.append(True))
    monkeypatch.setattr(judge.memory, "free_bytes", lambda: needs - 1 + (len(trimmed) > 0))
    c = judge.prepared(source("c"))
    assert a.oracle.alive and b.oracle.alive and len(trimmed) == 1, "memory that the judge keeps is enough"
    monkeypatch.setattr(judge.memory, "free_bytes", lambda: needs - 1 + (not a.oracle.alive))
    d = judge.prepared(source("d"))
    assert (a.oracle.alive, b.oracle.alive, c.oracle.alive, d.oracle.alive) == (False, True, True, True)
    monkeypatch.setattr(judge.memory, "free_bytes", lambda: 0)
    e = judge.prepared(source("e"))
    assert e.oracle.alive, "the task that is asked for stays"
    assert not any(one.oracle.alive for one in (b, c, d))
    monkeypatch.setattr(judge.memory, "policy_bytes", lambda: 100)
    monkeypatch.setattr(judge.memory, "free_bytes", lambda: needs + 99 + (not e.oracle.alive))
    assert judge.prepared(source("f")).oracle.alive and not e.oracle.alive, "the policy needs room, too"


@pytest.mark.parametrize(
    "message", ["CUDA out of memory. Tried", "out of device memory", "more than the device has left"]
)
def test_what_lacks_memory_beside_other_tasks_is_tried_again_alone(make: Make, trials: Trials, message: str) -> None:
    judge = make()
    judge.settings = replace(judge.settings, device="cuda")
    for error in (CandidateRefused("crash", message), TaskError(message)):
        other = judge.prepared(source("other"))
        trials.script = [error]
        assert judge.evaluate(request())["status"] == "ok" and not other.oracle.alive
    trials.script = [CandidateRefused("crash", message)]
    assert judge.evaluate(request())["status"] == "crash", "it was alone"
    other = judge.prepared(source("other"))
    trials.script = [CandidateRefused("crash", "an assertion")]
    assert judge.evaluate(request())["status"] == "crash" and other.oracle.alive


def test_what_lacks_memory_in_the_judge_is_tried_again_alone_and_is_then_the_tasks_fault(
    make: Make, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_name", lambda code: "CUDA_ERROR_OUT_OF_MEMORY")
    judge = make()
    judge.settings = replace(judge.settings, device="cuda")
    other, full = judge.prepared(source("other")), driver.DriverError(2, "cuMemAlloc_v2")

    def no_room(self: Any, index: int) -> Any:
        raise full

    trials.script = [full]
    assert judge.evaluate(request())["status"] == "ok" and not other.oracle.alive
    monkeypatch.setattr(prepared.PreparedTask, "entry", no_room)
    trials.script = [full, full]
    with pytest.raises(TaskError, match="more memory than the device has left"):
        judge.evaluate(request())
    assert "more memory than the device" in judge.probe({"task": source("a"), "compile": False})["error"]


def test_a_task_whose_reference_died_is_prepared_anew(make: Make) -> None:
    judge = make()
    dead = judge.prepared(source("a"))
    dead.oracle.close()
    assert judge.prepared(source("a")) is not dead


def test_a_solution_that_passes_is_ok_and_each_trial_is_cleaned_up(make: Make, trials: Trials) -> None:
    judge = make()
    answer = judge.evaluate(request())
    assert (answer["status"], answer["checks"], answer["phases"]) == ("ok", 3, {})
    judge.cleanup()
    assert trials.closed == len(trials.timed) == 1


def test_a_refused_solution_does_not_wait_for_baselines(make: Make, trials: Trials) -> None:
    judge = make(clock="real")
    trials.script = [CandidateRefused("wrong", "check 1: off")]
    answer = judge.evaluate(request())
    assert (answer["status"], answer["message"], trials.timed) == ("wrong", "check 1: off", [False])
    assert answer["eager_seconds"] is None


def test_baselines_are_measured_between_the_check_and_the_timed_trial(
    make: Make, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = make(clock="real")
    measured: list[int] = []

    def measure(task: Any, compile: bool) -> None:
        measured.append(len(trials.timed))
        task.baselines.eager, task.baselines.compile_tried = 3.0, True

    monkeypatch.setattr(prepared.PreparedTask, "measure", measure)
    answer = judge.evaluate(request())
    assert trials.timed == [False, True] and measured == [1]
    assert (answer["checks"], answer["eager_seconds"]) == (3, 3.0), "the first trial's checks are not counted twice"
    judge.evaluate(request())
    assert trials.timed[2:] == [True], "known baselines need no trial before them"


@pytest.mark.parametrize("second", [None, CandidateRefused("crash", "again", retryable=True)])
def test_a_death_that_may_be_anothers_fault_is_tried_once_more(make: Make, trials: Trials, second: Any) -> None:
    judge = make()
    trials.script = [CandidateRefused("crash", "killed", retryable=True), second]
    answer = judge.evaluate(request())
    assert len(trials.timed) == 2
    assert (answer["status"], answer["message"]) == (("crash", "again") if second else ("ok", ""))


def test_a_candidates_own_fault_is_tried_once(make: Make, trials: Trials) -> None:
    judge = make()
    trials.script = [CandidateRefused("crash", "segfault")]
    assert judge.evaluate(request())["status"] == "crash" and len(trials.timed) == 1


def test_the_verdict_says_that_a_task_is_random(make: Make, trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = make(clock="real")
    trials.script = [CandidateRefused("wrong", "check 1: off"), CandidateRefused("crash", "segfault")]
    reference: Any = judge.prepared(source("a")).oracle
    calls = iter(range(1, 9))
    monkeypatch.setattr(reference, "outputs", lambda inputs: [next(calls) * inputs[0]])
    answer = judge.evaluate(request())
    assert answer["status"] == "wrong" and "check 1: off; but the task's own outputs" in answer["message"]
    assert judge.evaluate(request())["message"] == "segfault"


@pytest.fixture
def sharing(make: Make, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """A judge whose solutions may share a context that has served one plan."""
    monkeypatch.setattr(judges, "may_share", lambda *_: True)
    judge = make()
    kept: Any = SimpleNamespace(alive=True, kill=lambda: None)
    judge._workers.shared._worker, judge._workers.shared.served = kept, 1
    return judge


@pytest.mark.parametrize("status", ["crash", "timeout", "cheat"])
def test_what_may_be_the_fault_of_a_used_context_is_judged_again_in_a_new_one(
    sharing: Judge, trials: Trials, status: Any
) -> None:
    trials.script = [CandidateRefused(status, "in check 1"), None]
    assert sharing.evaluate(request())["status"] == "ok" and trials.shared == [True, False]


@pytest.mark.parametrize("status", ["wrong", "build_error", "infra"])
def test_a_refusal_counts_if_the_used_context_still_computes_correctly(
    sharing: Judge, trials: Trials, status: Any
) -> None:
    trials.script = [CandidateRefused(status, "check 1: off")]
    assert sharing.evaluate(request())["status"] == status and trials.shared == [True]


def test_what_a_damaged_context_refuses_is_judged_again_in_a_new_one(sharing: Judge, trials: Trials) -> None:
    trials.proven = False
    trials.script = [CandidateRefused("wrong", "check 1: off"), None]
    assert sharing.evaluate(request())["status"] == "ok" and trials.shared == [True, False]
    trials.script, trials.seconds = [CandidateRefused("wrong", "an audit of a timed call"), None], [0.1, 1.5]
    assert sharing.evaluate(request())["samples"] == [1.5]
    trials.script = [CandidateRefused("wrong", "check 1: off"), CandidateRefused("wrong", "check 2: off")]
    assert sharing.evaluate(request())["message"] == "check 2: off"


def test_a_refusal_in_an_unused_context_is_final(sharing: Judge, trials: Trials) -> None:
    sharing._workers.shared.served = 0
    trials.script = [CandidateRefused("wrong", "check 1: off")]
    assert sharing.evaluate(request())["status"] == "wrong" and trials.shared == [True]


def test_a_context_whose_worker_has_died_counts_as_unused(sharing: Judge, trials: Trials) -> None:
    kept: Any = sharing._workers.shared._worker
    kept.alive = False
    trials.script = [CandidateRefused("crash", "in check 1")]
    assert sharing.evaluate(request())["status"] == "crash" and trials.shared == [True]


def test_a_new_best_time_of_a_used_context_is_timed_again_in_a_new_one(sharing: Judge, trials: Trials) -> None:
    sharing.prepared(source("a")).best = 2.0
    trials.seconds = [0.1, 1.5]  # what the used context claims, what a new one measures
    answer = sharing.evaluate(request())
    assert (answer["seconds"], answer["samples"], trials.shared) == (1.5, [1.5], [True, False])
    assert sharing.prepared(source("a")).best == 1.5
    trials.seconds, trials.script = [0.1, 1.5], [None, CandidateRefused("wrong", "check 1: off")]
    refused = sharing.evaluate(request())
    assert (refused["status"], refused["seconds"]) == ("wrong", None)
    trials.seconds = [1.6]
    assert sharing.evaluate(request())["seconds"] == 1.6 and trials.shared[4:] == [True]


def test_a_reference_that_is_killed_is_asked_again_once(make: Make, trials: Trials) -> None:
    judge = make()
    trials.script = [TaskKilled("killed")]
    assert judge.evaluate(request())["status"] == "ok"
    trials.script = [NotStarted("a worker exceeded its time before it began")]
    assert judge.evaluate(request())["status"] == "ok"
    trials.script = [TaskKilled("killed"), TaskKilled("killed")]
    with pytest.raises(TaskKilled):
        judge.evaluate(request())


def test_a_task_that_fails_beside_one_solution_only_is_the_solutions_crash(make: Make, trials: Trials) -> None:
    judge = make()
    trials.script = [TaskError("out of memory"), TaskError("out of memory")]
    answer = judge.evaluate(request())
    assert answer["status"] == "crash" and answer["message"].endswith("out of memory") and len(trials.timed) == 2


def test_a_probe_says_what_running_the_task_shows(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = make().probe({"task": source("a"), "compile": False})
    assert (answer["error"], answer["deterministic"], answer["mutants"]["zeros"]) == ("", True, None)

    def broken(*_: Any) -> None:
        raise TaskError("no such operator")

    monkeypatch.setattr(Judge, "prepared", broken)
    assert make().probe({"task": source("a"), "compile": False})["error"] == "no such operator"
