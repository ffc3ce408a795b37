"""The executor on a graph of small stages, in real processes, with real kills."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drill import journal, table

from cuda_agent.config import Config
from cuda_agent.pipeline import local, recorder, runs
from cuda_agent.pipeline.closure import environment_digest
from cuda_agent.pipeline.graph import STAGES, Stage
from cuda_agent.pipeline.local import StageView, run_pipeline
from cuda_agent.pipeline.manifest import cache_entry, find_result, identify, publish
from cuda_agent.storage import open_store
from cuda_agent.tracking import read_metrics


def settings(tmp_path: Path, epochs: int = 8, **sections) -> Config:
    values = {"run": {"store": str(tmp_path / "store"), "mlflow": "off"}, "critic": {"epochs": epochs}}
    for name, changes in sections.items():
        values[name] = values.get(name, {}) | changes
    return Config.model_validate(values)


def execute(config: Config, **options):
    return run_pipeline(config, stages=table.STAGES, table=table.NAME, preload=(), pause=0.05, **options)


def outputs(outcome) -> dict[str, dict[str, str]]:
    return {name: manifest.outputs for name, manifest in outcome.manifests.items()}


def steps(cache: Path) -> list[int]:
    return [int(line.split()[1]) for line in journal.read(cache) if line.startswith("step")]


def logged(tmp_path: Path, outcome, stage: str = "train"):
    folder = tmp_path / f"said-{outcome.run}-{stage}"
    open_store(tmp_path / "store").get_folder(outcome.manifests[stage].metrics, folder)
    return read_metrics(folder / "metrics.jsonl")


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def test_a_whole_run_makes_every_artifact_with_its_lineage(tmp_path, cache):
    views = []
    outcome = execute(settings(tmp_path), watch=lambda run, stages: views.append({v.name: v.state for v in stages}))
    assert (outcome.code, outcome.message) == (0, "")
    assert journal.read(cache)[0] == "make"
    train = outcome.manifests["train"]
    assert train.inputs == {"numbers": outcome.manifests["make"].outputs["numbers"]}
    assert train.device is None and outcome.manifests["side"].device
    assert all(len(x) == 64 for x in (train.code, train.environment, train.config, train.key))
    assert outcome.report and (outcome.report / "index.html").exists()
    said = json.loads((outcome.report / "report.json").read_text())
    assert set(said) == {"config.json", "graph.json"} | {
        f"{stage}/{file}"
        for stage in ("make", "train", "side")
        for file in ("metrics.jsonl", "notes.jsonl", "manifest.json")
    }
    assert views[-1] == dict.fromkeys(("make", "train", "side", "twin", "report"), "done")
    store = open_store(tmp_path / "store")
    assert not store.list("checkpoints"), "a finished stage needs none"
    assert runs.list_runs(store)[0].status == "done"


def test_the_second_run_is_served_from_the_cache_without_a_process(tmp_path, cache, monkeypatch):
    first = execute(settings(tmp_path))
    events = journal.read(cache)

    def refuse(*_):
        raise AssertionError("a process was started")

    monkeypatch.setattr(local.Spawner, "start", refuse)
    second = execute(settings(tmp_path))
    assert second.code == 0 and second.run != first.run and not second.resumed
    assert outputs(second) == outputs(first) and journal.read(cache) == events
    assert [run.status for run in runs.list_runs(open_store(tmp_path / "store"))] == ["done", "done"]


def test_a_changed_section_reruns_only_who_reads_it_and_what_follows(tmp_path, cache):
    execute(settings(tmp_path, epochs=3))
    before = len(journal.read(cache))
    changed = execute(settings(tmp_path, epochs=4))
    assert changed.code == 0
    assert [line for line in journal.read(cache)[before:] if not line.startswith("step")] == ["train", "report"]


def test_a_stage_that_is_not_in_the_cache_says_what_has_changed(tmp_path, cache):
    notes = {}

    def watch(run, views):
        for view in views:
            notes.setdefault(view.name, []).extend(note for note in view.notes if note not in notes.get(view.name, []))

    first = execute(settings(tmp_path, epochs=3), watch=watch)
    assert not any(notes.values()), "nothing was ever in the cache"
    execute(settings(tmp_path, epochs=4), watch=watch)
    since = f"not in the cache; changed since run {first.run}: "
    assert notes == {
        "make": [],
        "train": [f"{since}critic.epochs 3 -> 4"],
        "side": [],
        "twin": [],
        "report": [f"{since}input (stages, state)"],
    }


def test_a_change_that_leaves_an_output_alike_stops_there(tmp_path, cache):
    execute(settings(tmp_path, epochs=3))
    before = len(journal.read(cache))
    execute(settings(tmp_path, epochs=3, collect={"samples": 6}))  # the default, so the same configuration
    assert len(journal.read(cache)) == before


@pytest.mark.parametrize("how", ["die-before-save", "die-after-save"])
def test_a_stage_killed_in_the_middle_goes_on_and_counts_no_step_twice(tmp_path, cache, how):
    journal.misbehave(cache, "train", how)
    outcome = execute(settings(tmp_path))
    assert outcome.code == 0
    assert len(steps(cache)) <= 8 + 1, "at most one step is repeated"
    assert list(logged(tmp_path, outcome)) == list(range(8))
    assert sum(values["tokens"] for values in logged(tmp_path, outcome).values()) == 80
    assert len(outcome.manifests["train"].resumed) == 1
    whole = execute(settings(tmp_path / "other"))
    assert outputs(whole)["train"] == outputs(outcome)["train"]


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["step 0", "step 4", "side"])
def test_the_whole_run_killed_goes_on_with_the_same_run(tmp_path, cache, place):
    drill = Path(__file__).parent
    command = [sys.executable, "-m", "drill", str(tmp_path / "store"), "critic.epochs=8", "sandbox.clock=model"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(drill), str(drill.parents[1])])}
    journal.hold(cache)  # the run cannot be over before it is killed
    victim = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 60
    while place not in journal.read(cache) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    journal.hold(cache, False)
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert second.returncode == 0, second.stdout + second.stderr
    store = open_store(tmp_path / "store")
    assert len(runs.list_runs(store)) == 1
    assert len(steps(cache)) <= 8 + 1
    found = runs.run_manifests(store, runs.list_runs(store)[0], table.STAGES)
    whole = execute(settings(tmp_path / "whole", sandbox={"clock": "model"}))
    assert {name: manifest.outputs for name, manifest in found.items()} == outputs(whole)
    assert {name: manifest.key for name, manifest in found.items()} == {n: m.key for n, m in whole.manifests.items()}


def family(pid: int) -> list[int]:
    """Returns the process and all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


@pytest.mark.parametrize("everywhere", [False, True], ids=["to the run", "to all processes, as Argo's executor does"])
def test_sigterm_writes_a_checkpoint_and_the_run_can_go_on(tmp_path, cache, everywhere):
    drill = Path(__file__).parent
    command = [sys.executable, "-m", "drill", str(tmp_path / "store"), "critic.epochs=200"]
    journal.misbehave(cache, "train", "wait")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(drill), str(drill.parents[1])])}
    running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(steps(cache)) < 6 and time.monotonic() < deadline:
        time.sleep(0.005)
    for pid in family(running.pid) if everywhere else [running.pid]:
        os.kill(pid, signal.SIGTERM)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 75 and "same command" in said
    store = open_store(tmp_path / "store")
    (run,) = runs.list_runs(store)
    assert run.status == "interrupted"
    newest = max(key for key in store.list("checkpoints") if key.endswith(".json") and "/state" not in key)
    assert f"{steps(cache)[-1]:08d}" in newest
    said = [json.loads(path.read_text()) for path in tmp_path.rglob("outcome.json")]
    assert {"code": 75, "message": f"stopped after step {steps(cache)[-1]}"} in said, "the stage ended by itself"


def test_new_starts_another_run_and_the_unfinished_one_is_left(tmp_path, cache):
    journal.misbehave(cache, "make", "gate")
    first = execute(settings(tmp_path))
    again = execute(settings(tmp_path), new=True)
    assert first.code == 79 and again.code == 0 and first.run != again.run and not again.resumed


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [("gate", 79, "below 0.2"), ("config", 78, "no tokenizer"), ("bug", 1, "ZeroDivisionError")],
)
def test_a_stage_that_ends_badly_is_not_tried_again_and_says_why(tmp_path, cache, how, code, words):
    journal.misbehave(cache, "make", how)
    outcome = execute(settings(tmp_path))
    assert (outcome.code, outcome.stage) == (code, "make")
    assert words in outcome.message and "Traceback" not in outcome.message
    assert journal.read(cache) == ["make"]
    resumed = execute(settings(tmp_path))
    assert resumed.code == 0 and resumed.resumed and resumed.run == outcome.run


def test_try_again_is_retried_as_often_as_configured(tmp_path, cache):
    journal.misbehave(cache, "make", "retry", times=2)
    assert execute(settings(tmp_path, run={"retries": 2})).code == 0
    assert journal.read(cache).count("make") == 3


def test_after_the_last_retry_the_run_ends_with_75(tmp_path, cache):
    journal.misbehave(cache, "make", "retry", times=5)
    outcome = execute(settings(tmp_path, run={"retries": 1}))
    assert outcome.code == 75 and "device was lost" in outcome.message
    assert journal.read(cache) == ["make", "make"]


def test_a_stage_that_forgets_an_output_is_a_bug(tmp_path, cache):
    journal.misbehave(cache, "make", "forgetful")
    outcome = execute(settings(tmp_path))
    assert outcome.code == 1 and "without writing numbers" in outcome.message


def test_a_second_run_of_the_same_configuration_says_that_one_is_under_way(tmp_path, cache):
    config = settings(tmp_path)
    answers = []

    def watch(run, views):
        if not answers:
            answers.append(execute(config))

    assert execute(config, watch=watch).code == 0
    assert answers[0].code == 75 and "under way" in answers[0].message


@pytest.mark.parametrize("parallel", [True, False])
def test_siblings_run_side_by_side_only_when_asked_and_never_beside_one_that_times(tmp_path, cache, parallel):
    together = set()

    def watch(run, views):
        together.add(frozenset(view.name for view in views if view.state == "running"))

    assert execute(settings(tmp_path, run={"parallel_stages": parallel}), watch=watch).code == 0
    assert (frozenset({"train", "twin"}) in together) == parallel
    assert all(len(names) == 1 for names in together if "side" in names)


def test_a_damaged_artifact_is_noticed_and_made_again(tmp_path, cache):
    first = execute(settings(tmp_path))
    store = open_store(tmp_path / "store")
    tree = store.tree(first.manifests["make"].outputs["numbers"])
    blob = tmp_path / "store" / "cas" / tree["n.txt"]["sha256"]
    size = blob.stat().st_size
    blob.chmod(0o644)
    blob.write_bytes(b"x" * size)  # bytes rot, the size stays
    second = execute(settings(tmp_path, epochs=3))
    assert second.code == 0
    assert journal.read(cache).count("make") == 2
    assert outputs(second)["make"] == outputs(first)["make"]


def test_a_missing_artifact_behind_a_cache_entry_is_made_again(tmp_path, cache):
    first = execute(settings(tmp_path))
    store = open_store(tmp_path / "store")
    store.delete(f"cas/{first.manifests['side'].outputs['total']}")
    second = execute(settings(tmp_path))
    assert second.code == 0 and outputs(second) == outputs(first)
    assert journal.read(cache).count("side") == 2


def test_a_run_that_died_between_manifest_and_cache_entry_repeats_nothing(tmp_path, cache):
    journal.misbehave(cache, "make", "retry")
    execute(settings(tmp_path, run={"retries": 0}))
    outcome = execute(settings(tmp_path, run={"retries": 0}))
    store = open_store(tmp_path / "store")
    store.delete(cache_entry("train", outcome.manifests["train"].key))
    store.delete(f"runs/{outcome.run}/end.json")
    before = len(steps(cache))
    again = execute(settings(tmp_path, run={"retries": 0}))
    assert again.run == outcome.run and again.code == 0 and len(steps(cache)) == before
    assert store.exists(cache_entry("train", outcome.manifests["train"].key))


def test_a_result_that_lost_episodes_stays_with_its_run(tmp_path, cache):
    journal.misbehave(cache, "train", "lose")
    first = execute(settings(tmp_path))
    lossy = first.manifests["train"]
    assert first.code == 0 and lossy.lost == 2
    store = open_store(tmp_path / "store")
    identity = identify(table.STAGES[1], settings(tmp_path), lossy.inputs)
    assert identity.key == lossy.key
    assert find_result(store, first.run, identity) == lossy, "the run itself goes on with it"
    assert find_result(store, "another", identity) is None
    second = execute(settings(tmp_path))
    assert second.manifests["train"].lost == 0 and journal.read(cache).count("train") == 2
    third = execute(settings(tmp_path))
    assert third.manifests["train"] == second.manifests["train"] and journal.read(cache).count("train") == 2
    assert publish(store, first.run, lossy) == second.manifests["train"], "a whole result is preferred"


def test_a_full_disk_is_one_clear_message_and_nothing_is_lost(tmp_path, cache):
    command = [sys.executable, "-m", "drill", str(tmp_path / "store"), "critic.epochs=3", "run.retries=0"]
    drill = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(drill), str(drill.parents[1])])}
    full = environment | {"DRILL_LARGEST_FILE": "300000"}
    first = subprocess.run(command, env=full, capture_output=True, text=True, timeout=120)
    assert first.returncode == 75 and "room" in first.stdout and "Traceback" not in first.stdout + first.stderr
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert second.returncode == 0
    assert first.stdout.split()[0] == second.stdout.split()[0], "the same run goes on"


def test_a_store_that_is_not_reachable_is_one_clear_message(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("CUDA_AGENT_HOME", str(tmp_path))
    outcome = execute(settings(tmp_path, run={"store": "s3://bucket/prefix"}))
    assert outcome.code == 75 and "does not answer" in outcome.message and "Traceback" not in outcome.message


def test_memory_is_no_store_for_a_run(tmp_path):
    outcome = execute(settings(tmp_path, run={"store": "memory://"}))
    assert outcome.code == 78 and "run.store" in outcome.message


def test_model_clock_leaves_no_times_in_what_the_report_reads(tmp_path, cache):
    one = execute(settings(tmp_path, sandbox={"clock": "model"}))
    other = execute(settings(tmp_path / "other", sandbox={"clock": "model"}))
    assert outputs(one) == outputs(other)
    said = json.loads((one.report / "report.json").read_text())
    assert "tokens_per_second" not in said["train/metrics.jsonl"] and '"tokens"' in said["train/metrics.jsonl"]


def test_with_the_model_clock_a_report_is_the_same_wherever_it_was_made(tmp_path, cache, monkeypatch):
    def there(environment: str) -> local.RunOutcome:
        monkeypatch.setenv("CUDA_AGENT_DEVICE", f"a device of {environment}")
        monkeypatch.setenv("CUDA_AGENT_IMAGE_DIGEST", environment)
        environment_digest.cache_clear()
        return execute(settings(tmp_path / environment, sandbox={"clock": "model"}))

    one, other = there("one"), there("other")
    environment_digest.cache_clear()
    assert outputs(one) == outputs(other)
    keys = [{name: manifest.key for name, manifest in outcome.manifests.items()} for outcome in (one, other)]
    assert all(keys[0][name] != keys[1][name] for name in keys[0]), "results of another place are kept apart"


def test_times_of_a_ray_elsewhere_are_kept_apart_from_this_machines():
    here = Config.model_validate({"runtime": "ray"})
    there = Config.model_validate({"runtime": "ray", "ray": {"address": "box-1:6379"}})
    for stage in [stage for stage in STAGES if stage.timing]:
        one, other = (identify(stage, config, {}).device for config in (here, there))
        assert (other == "ray") == ("ray" in stage.config) and one != "ray"


def test_losing_mlflow_never_stops_a_run(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(recorder.Mirror, "close", lambda self, timeout: False)
    config = settings(tmp_path, run={"mlflow": "http://127.0.0.1:9"})
    assert execute(config).code == 0


def execution(tmp_path, stages) -> Any:
    """An execution of ``stages`` that has started no process."""
    made = object.__new__(local._Execution)
    views = {stage.name: StageView(stage.name, 1.0) for stage in stages}
    run = SimpleNamespace(retries=2, store=str(tmp_path), parallel_stages=True)
    facts = {
        "config": SimpleNamespace(run=run), "store": open_store(tmp_path / "store"), "stages": stages, "table": "",
        "run_record": SimpleNamespace(name="r", config="c"), "scratch": tmp_path / "scratch", "views": views,
        "home": tmp_path, "done": {}, "running": {}, "again_at": {}, "notes": {}, "pause": 0.0, "stopping": False,
    }  # fmt: skip
    vars(made).update(facts)
    return made


def test_two_stages_that_find_one_input_damaged_have_it_made_once(tmp_path, monkeypatch):
    above = Stage("above", "m", outputs=("x",))
    one, two = (Stage(name, "m", inputs={"x": "above.x"}) for name in ("one", "two"))
    made = execution(tmp_path, [above, one, two])
    made.done["above"] = "damaged"
    monkeypatch.setattr(local, "is_whole", lambda store, manifest: False)
    for stage in (one, two):
        made.views[stage.name].attempt = 1
        made._ended(stage, 75)
    assert made.done == {} and [made.views[n].state for n in ("above", "one", "two")] == ["waiting", "retry", "retry"]
    made._read(made.views["above"])
    assert made.views["above"].notes == ["its result is damaged and is made again"], "a note outlives the next look"


def test_a_stage_does_not_start_after_a_signal_that_came_while_the_cache_was_asked(tmp_path, monkeypatch):
    stage = Stage("one", "m")
    made = execution(tmp_path, [stage])

    def asked(*_):
        made.stopping = True

    monkeypatch.setattr(local, "identity_of", lambda *_: None)
    monkeypatch.setattr(local, "serve_from_cache", asked)
    made._serve_or_start(stage, None)
    assert made.running == {}
