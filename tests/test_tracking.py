"""Metrics: nothing is counted twice, and MLflow is a mirror that may be lost."""

import threading
import time

import pytest

from cuda_agent import mlflow_api
from cuda_agent.tracking import (
    RUN_TAG,
    STAGE_TAG,
    STORE_TAG,
    FileTracker,
    Mirror,
    read_metrics,
    read_notes,
    read_progress,
    with_tag,
)
from tests.mlflow_server import serving


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_logging_a_step_again_replaces_it(tmp_path):
    tracker = FileTracker(tmp_path)
    tracker.log(0, {"loss": 2.0, "tokens": 10})
    tracker.log(1, {"loss": 1.0})
    tracker.log(0, {"loss": 3.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == {0: {"loss": 3.0, "tokens": 10.0}, 1: {"loss": 1.0}}


def test_restoring_forgets_what_came_after(tmp_path):
    tracker = FileTracker(tmp_path / "a")
    tracker.log(0, {"loss": 2.0})
    tracker.note("one")
    tracker.save(tmp_path / "kept")
    tracker.log(1, {"loss": 1.0})
    tracker.note("two")
    tracker.restore(tmp_path / "kept")
    assert list(read_metrics(tmp_path / "a" / "metrics.jsonl")) == [0]
    assert read_notes(tmp_path / "a" / "notes.jsonl") == ["one"]
    tracker.log(1, {"loss": 0.5})
    assert read_metrics(tmp_path / "a" / "metrics.jsonl")[1] == {"loss": 0.5}


def test_a_value_that_is_no_number_becomes_a_note(tmp_path):
    tracker = FileTracker(tmp_path)
    tracker.log(4, {"loss": float("nan"), "reward": 1.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == {4: {"reward": 1.0}}
    assert read_notes(tmp_path / "notes.jsonl") == ["loss was nan at step 4"]


def test_a_line_torn_by_a_kill_is_ignored(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo')
    assert read_metrics(tmp_path / "metrics.jsonl") == {0: {"loss": 1.0}}


def test_progress_shows_the_end_even_when_it_comes_fast(tmp_path):
    tracker = FileTracker(tmp_path)
    for done in range(1, 6):
        tracker.progress(done, 5, unit="tasks", tokens_per_second=3.0)
    assert read_progress(tmp_path / "progress.json") == {
        "done": 5,
        "total": 5,
        "unit": "tasks",
        "rates": {"tokens_per_second": 3.0},
    }


def test_a_lost_mlflow_is_told_once_and_closing_does_not_hang():
    said = []
    mirror = Mirror("http://127.0.0.1:9", "x", "run", None, said.append)
    mirror.update("stage", metrics={0: {"loss": 1.0}})
    began = time.monotonic()
    assert not mirror.close(timeout=0.3)
    assert time.monotonic() - began < 5
    wait_for(lambda: said)
    assert len(said) == 1 and "kept in the store" in said[0]


@pytest.fixture(scope="module", params=["database", "server"])
def there(request, tmp_path_factory):
    """Where MLflow is, and where artifacts of its experiments go (None: where the server says)."""
    folder = tmp_path_factory.mktemp("mlflow")
    if request.param == "database":
        yield f"sqlite:///{folder}/mlflow.db", folder / "artifacts"
    else:
        with serving(folder) as address:
            yield address, None


def mirror_once(there, run, entries, report=None):
    mirror = Mirror(there[0], "drill", run, there[1], lambda text: None)
    for stage, facts in entries.items():
        mirror.update(stage, **facts)
    mirror.update(None, status="FINISHED", artifacts=[report] if report else [])
    assert mirror.close(timeout=120)


def test_two_stores_with_a_run_of_the_same_name_share_no_row(there):
    found = []
    for store in ("one", "two", "one"):
        mirror = Mirror(there[0], "shared", "first", there[1], lambda text: None, store=store)
        mirror.update("critic", metrics={0: {"loss": 1.0}}, tags={"of": store})
        assert mirror.close(timeout=120)
        api = mlflow_api.connect(there[0])
        rows = api.find([api.experiment("shared", None)], RUN_TAG, "first")
        found.append(sorted((row.tags.get(STAGE_TAG), row.tags.get(STORE_TAG), row.tags.get("of")) for row in rows))
    assert len(found[0]) == 2 and found[1] == found[2] and len(found[1]) == 4
    assert {row.tags["of"] for row in with_tag(rows, STORE_TAG, "two") if row.tags.get(STAGE_TAG)} == {"two"}


def test_a_deleted_experiment_is_restored(there):
    from mlflow import MlflowClient

    api = mlflow_api.connect(there[0])
    there_is = api.experiment("deleted", None)
    MlflowClient(tracking_uri=there[0]).delete_experiment(there_is)
    assert api.experiment("deleted", None) == there_is
    assert api.create(there_is, {RUN_TAG: "x"}).run_id


def test_a_retry_lands_in_the_same_runs_and_no_point_is_there_twice(there, tmp_path):
    page = tmp_path / "report"
    page.mkdir()
    (page / "index.html").write_text("<p>")
    first = {
        None: {"params": {"critic.lr": 0.001}, "tags": {"config": "abc"}},
        "critic": {"metrics": {0: {"loss": 2.0}, 1: {"loss": 1.5}}, "status": "KILLED"},
    }
    mirror_once(there, "r1", first)
    second = {
        None: {"params": {"critic.lr": 0.002}, "status": "RUNNING"},
        "critic": {"metrics": {s: {"loss": 2.0 - s / 2, "ev": 0.1} for s in range(4)}, "status": "FINISHED"},
    }
    mirror_once(there, "r1", second, page)
    mirror_once(there, "r2", {"critic": {"metrics": {0: {"loss": 9.0}}, "status": "FINISHED"}})

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=there[0])
    experiment = client.get_experiment_by_name("drill")
    found = {
        run.info.run_name: run
        for run in client.search_runs([experiment.experiment_id], "attributes.run_name LIKE 'r%'")
    }
    assert set(found) == {"r1", "r2"}
    parent = found["r1"]
    assert parent.info.status == "FINISHED" and parent.data.params == {"critic.lr": "0.001"}
    children = client.search_runs([experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert [child.info.run_name for child in children] == ["critic"]
    child = children[0]
    assert child.info.status == "FINISHED"
    history = client.get_metric_history(child.info.run_id, "loss")
    assert sorted((point.step, point.value) for point in history) == [(0, 2.0), (1, 1.5), (2, 1.0), (3, 0.5)]
    assert len(client.get_metric_history(child.info.run_id, "ev")) == 4
    assert [item.path for item in client.list_artifacts(parent.info.run_id)] == ["index.html"]


def test_what_is_finished_is_not_asked_for_again_and_new_points_of_others_are_sent(there):
    """More than one request's worth, and a second mirror that knows more of one stage than the first did."""
    many = {step: {"loss": float(step), "reward": 1.0} for step in range(1000)}
    tags = {"key": "abc", "seconds": "1.5"}
    done = {"params": {f"p{n}": n for n in range(200)}, "metrics": many, "tags": tags, "status": "FINISHED"}
    mirror_once(there, "r3", {"synthesis": done, "critic": {"metrics": {0: {"loss": 1.0}}, "status": "KILLED"}})
    more = {"metrics": {0: {"loss": 1.0}, 1: {"loss": 0.5}}, "tags": {"key": "def"}, "status": "FINISHED"}
    mirror_once(there, "r3", {"synthesis": done, "critic": more})

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=there[0])
    experiment = client.get_experiment_by_name("drill")
    found = {
        run.data.tags["cuda_agent.stage"]: run
        for run in client.search_runs([experiment.experiment_id], "tags.`cuda_agent.run` = 'r3'")
    }
    assert set(found) == {"", "synthesis", "critic"}
    assert len(found["synthesis"].data.params) == 200 and tags.items() <= found["synthesis"].data.tags.items()
    history = client.get_metric_history(found["synthesis"].info.run_id, "loss")
    assert sorted((point.step, point.value) for point in history) == [(step, float(step)) for step in range(1000)]
    history = client.get_metric_history(found["critic"].info.run_id, "loss")
    assert sorted((point.step, point.value) for point in history) == [(0, 1.0), (1, 0.5)]


def test_update_returns_at_once_while_mlflow_is_slow(monkeypatch):
    from cuda_agent import mlflow_api

    gate = threading.Event()
    monkeypatch.setattr(mlflow_api, "connect", lambda uri: gate.wait(60))
    mirror = Mirror("sqlite:////nowhere", "x", "run", None, lambda text: None)
    began = time.monotonic()
    for step in range(1000):
        mirror.update("stage", metrics={step: {"loss": 1.0}})
    assert time.monotonic() - began < 5
    gate.set()
    mirror.close(timeout=0.01)
