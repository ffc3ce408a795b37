"""A prepared task: its secret inputs, and what is kept of its baselines."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.errors import TaskError
from cuda_agent.sandbox.jail.processes import WorkerDied, WorkerError
from cuda_agent.sandbox.judge import prepared
from cuda_agent.sandbox.judge.memory import host
from cuda_agent.sandbox.judge.prepared import PreparedTask
from cuda_agent.sandbox.judge.reference_client import TaskKilled
from tests.sandbox.judge.fakes import LENGTH, Pool, Reference, settings_in

Make = Callable[..., PreparedTask]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(prepared, "ReferenceClient", Reference)

    def made(digest: str = "d", **settings: Any) -> PreparedTask:
        pool: Any = Pool(settings_in(tmp_path, **settings))
        return PreparedTask("", digest, pool)

    return made


def first_input(task: PreparedTask, index: int) -> bytes:
    return bytes(task.entry(index).inputs[0].tobytes())


def test_inputs_are_secret_with_a_real_clock_and_the_tasks_own_with_the_model_clock(make: Make) -> None:
    assert first_input(make(clock="real"), 0) != first_input(make(clock="real"), 0)
    assert first_input(make(clock="model"), 0) == first_input(make(clock="model"), 0)
    assert first_input(make("d", clock="model"), 0) != first_input(make("e", clock="model"), 0)


def test_entries_are_made_once_and_have_the_references_outputs(make: Make) -> None:
    task = make()
    reference: Any = task.oracle
    entry = task.entry(1)
    assert (entry.outputs[0] == 2 * entry.inputs[0]).all()
    assert task.entry(1) is entry and len(reference.seeds) == 1, "on a CPU one request draws one"
    assert task.entry(1 + task.pool_size) is not entry, "the pool is a ring"


def test_the_weights_have_a_seed_of_their_own(make: Make) -> None:
    task = make()
    assert task.weights_seed not in {task._seed(index) for index in range(1000)}


def test_after_each_evaluation_its_inputs_are_retired_and_the_next_ones_made(make: Make) -> None:
    task = make(clock="real")
    reference: Any = task.oracle
    for index in range(3):
        task.entry(task.base + index)
    task.rotate(used=3)
    made = len(reference.seeds)
    assert task.base == 3 and made == 3 + task.pool_size
    for index in range(3):
        task.entry(task.base + index)
    assert len(reference.seeds) == made
    fixed = make(clock="model")
    fixed.rotate(used=3)
    assert fixed.base == 0


def test_on_a_gpu_one_request_draws_what_the_next_trial_needs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "memory_of", lambda device: host)
    task = make(clock="real", device="cuda", checks=5, timed_calls=24)
    reference: Any = task.oracle
    task.rotate(used=1)
    entries = [task.entry(task.base + number) for number in range(13)]
    assert reference.asked == [13] and len({entry.inputs[0].tobytes() for entry in entries}) == 13
    assert all((entry.outputs[0] == 2 * entry.inputs[0]).all() for entry in entries)
    task.rotate(used=10)
    assert reference.asked == [13, 10], "three are left"
    task.entry(task.base + 13)
    assert reference.asked == [13, 10, 4] and task.bytes > (17 + reference.batch) * task._call_bytes


def test_fresh_inputs_never_come_again_and_not_every_kind_exists(make: Make) -> None:
    task = make(clock="model")
    one, two = task.fresh("normal"), task.fresh("normal")
    assert one and two and (one.inputs[0] != two.inputs[0]).any() and one.exact is not None
    assert task.fresh("sparse") is None


def test_all_candidates_get_the_same_varied_inputs_until_the_weights_or_the_room_change(make: Make) -> None:
    task = make(clock="real")
    before = task.bytes
    entry = task.varied("large")
    assert entry and task.varied("large") is entry and (entry.outputs[0] == 2 * entry.inputs[0]).all()
    assert entry.exact is not None and task.bytes > before and task.varied("sparse") is None
    task.rotate(used=1)
    assert task.varied("large") is entry
    task._weights += 1
    assert task.varied("large") is not entry
    task.drop_pool()
    assert task.bytes == before


def test_a_model_that_knows_no_double_precision_is_checked_on_normal_inputs_only(make: Make) -> None:
    task = make()
    tried: list[int] = []

    def exact(inputs: Any) -> Any:
        tried.append(1)
        raise TaskError("not in double precision")

    task.oracle.exact = exact  # type: ignore[method-assign]
    entry = task.fresh("normal")
    assert entry and entry.exact is None and task.fresh("shifted") is None
    assert len(tried) == 1


def test_another_precision_is_left_again_after_an_error_too(make: Make) -> None:
    task = make()
    reference: Any = task.oracle
    reference.outputs = lambda inputs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        task.outputs_at([], "tf32")
    assert reference.precisions == ["tf32", "default"]


def test_with_the_model_clock_baselines_are_costs_and_nothing_is_kept(make: Make, tmp_path: Path) -> None:
    task = make(clock="model")
    task.measure(compile=True)
    assert task.measured("strict") and task.baselines.eager and task.baselines.compile
    assert not (tmp_path / "baselines").exists()


def test_baselines_are_measured_once_and_survive(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make(clock="real")
    compiled = Reference()
    compiled.takes = 2.0
    monkeypatch.setattr(task, "compiled", lambda mode, precision: compiled)
    monkeypatch.setattr(PreparedTask, "_peaks", lambda self, again=False: prepared.roofline.Peaks(1e9))
    assert not task.measured("quick")
    task.measure(compile=True)
    assert (task.baselines.eager, task.baselines.compile) == (2.0, 1.0), "an empty call takes 1 s here"
    assert task.baselines.written == 4 * LENGTH and not compiled.alive
    again = make(clock="real")
    assert task.baselines.share == (0.5, 0.5, 0.5)
    task.baselines.share = [0.5, 0.5, 0.5]  # type: ignore[assignment]  # as JSON has it
    assert again.measured("quick") and again.baselines == task.baselines
    assert not again.measured("strict") and not make("other", clock="real").measured("quick")
    again._file().write_text('{"eager": ')
    assert make(clock="real").baselines.eager is None, "a file that was cut counts for nothing"


def test_a_compiling_worker_that_was_killed_is_tried_once_more(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make(clock="real")
    ends = ["killed", "crash"]

    def compiled(mode: str, precision: str) -> Any:
        raise WorkerDied(ends.pop(0), "ended")

    monkeypatch.setattr(task, "compiled", compiled)
    task._measure_compile()
    assert not ends and task.baselines.compile_tried and task.baselines.compile is None
    assert task.baselines.compile_error == "torch.compile: ended" and task.baselines.eager == 2.0


def test_the_best_round_counts_and_the_empty_call_is_taken_off(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work on the machine only ever makes calls slower."""
    task = make(clock="real")
    reference: Any = task.oracle
    calls = iter([9.0, 9.0, 9.0, 5.0, 14.0, 9.0, 5.0, 7.0, 20.0, 5.0, 12.0])
    monkeypatch.setattr(reference, "seconds", lambda inputs, null=False: 1.0 if null else next(calls))
    monkeypatch.setattr(prepared, "_BASELINE_CALLS", 3)
    monkeypatch.setattr(prepared, "_BASELINE_ROUNDS", 3)
    assert [statistics.median(calls) for calls in task.samples(reference)] == [6.0]


def test_a_time_below_the_floor_is_checked_with_new_peaks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make(clock="real")
    asked: list[bool] = []
    monkeypatch.setattr(task, "_peaks", lambda again=False: asked.append(again))
    doubts = iter(["too fast", ""])
    monkeypatch.setattr(prepared.roofline, "below_physical_floor", lambda *_: next(doubts))
    assert task.below_physical_floor(1e-9) == "" and asked == [True]


def test_views_of_another_number_of_outputs_count_as_none(make: Make) -> None:
    task = make()
    task.baselines.views = [[1], [2]]
    assert task.views == [None]
    task.baselines.views = [[1]]
    assert task.views == [[1]]


def test_the_key_of_baselines_names_all_they_depend_on(tmp_path: Path) -> None:
    names = [("d", "2.0"), ("e", "2.0"), ("d", "2.1")]
    settings = [{}, {"threads": 2}, {"identity": "gpu"}, {"train_mode": True}]
    files = {prepared.baselines_file(settings_in(tmp_path, **more), *name) for name in names for more in settings}
    assert len(files) == len(names) * len(settings)


def test_baselines_are_read_as_they_were_saved_and_a_torn_file_counts_as_none(make: Make) -> None:
    task = make(clock="real")
    task.baselines.eager, task.baselines.compile_tried = 2.0, True
    task.save()
    file = prepared.baselines_file(task.settings, "d", task._workers.torch)
    assert prepared.read_baselines(file) == task.baselines
    file.write_text(file.read_text()[:9])
    assert prepared.read_baselines(file) == prepared.Baselines()


def test_a_disk_that_is_full_costs_the_cache_only(make: Make, tmp_path: Path) -> None:
    (tmp_path / "baselines").write_text("not a folder")
    make(clock="real").save()
    assert (tmp_path / "baselines").read_text() == "not a folder"


def test_baselines_that_another_judge_measured_are_not_measured_again(make: Make, tmp_path: Path) -> None:
    one, other = make(clock="real"), make(clock="real")
    other.baselines = prepared.Baselines(eager=2.0, compile=1.0, share=(0.4, 0.5, 0.6), compile_tried=True)
    other.save()
    assert not one.measured("quick")
    one.read_baselines()
    assert one.measured("quick") and one.baselines.compile == 1.0
    one.baselines.eager = 3.0
    one.read_baselines()
    assert one.baselines.eager == 3.0, "known ones stay"


def test_a_model_that_once_took_too_long_to_compile_is_not_compiled_again(make: Make) -> None:
    task = make(clock="real")
    task.baselines.compile_error = "torch.compile: did not finish in time"
    with pytest.raises(WorkerError, match="did not finish in time"):
        task.compiled("max-autotune-no-cudagraphs", "fp32")


def test_a_model_that_raises_on_a_kind_of_inputs_has_none_of_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the inverse of a singular matrix. On normal inputs it is the task's fault."""
    task = make()

    def fails(inputs: list[Any]) -> list[Any]:
        raise TaskError("singular")

    monkeypatch.setattr(task.oracle, "outputs", fails)
    assert task.fresh("boundary") is None
    with pytest.raises(TaskError, match="singular"):
        task.fresh("normal")
    task.oracle.alive = False
    with pytest.raises(TaskError, match="singular"):
        task.fresh("boundary")


def test_simulated_times_are_never_kept_for_other_judges(make: Make, tmp_path: Path) -> None:
    task = make()
    task.measure(compile=True)
    task.save()
    assert not (tmp_path / "baselines").exists()


def test_a_compiled_model_that_fails_while_it_is_timed_is_an_error_of_torch_compile(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make(clock="real")
    closed = []

    class Compiled(Reference):
        def seconds(self, inputs: list[Any], null: bool = False) -> float:
            raise TaskError("recompiles for ever")

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(prepared, "_BASELINE_SECONDS", 0.01)
    monkeypatch.setattr(task, "compiled", lambda mode, precision: Compiled())
    task.measure(compile=True)
    base = task.baselines
    assert (base.compile_tried, base.compile, base.eager) == (True, None, 2.0) and len(closed) == 1
    assert base.compile_error == "torch.compile: recompiles for ever"


def test_a_worker_that_the_system_kills_in_float64_is_no_property_of_the_task(make: Make) -> None:
    task = make()

    def exact(inputs: Any) -> Any:
        raise TaskKilled("killed by the system")

    task.oracle.exact = exact  # type: ignore[method-assign]
    with pytest.raises(TaskKilled):
        task.fresh("normal")
