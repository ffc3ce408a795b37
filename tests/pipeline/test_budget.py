"""A run's budget of GPU-hours: what is counted, and how the run ends and goes on."""

import json

import pytest
from drill import journal, table

from cuda_agent.config import Config
from cuda_agent.errors import BudgetSpent, TryAgain
from cuda_agent.pipeline import budget, runs
from cuda_agent.pipeline.budget import Use, gpu_hours, gpus, metered
from cuda_agent.pipeline.local import run_pipeline
from cuda_agent.storage import open_store

HOUR = 3600.0
ONE_GPU = json.dumps({"stage": 1, "ray": 0, "sandboxes": 0, "engines": 0})


def settings(tmp_path, gpu_hours: float | None) -> Config:
    run = {"store": str(tmp_path / "store"), "mlflow": "off", "gpu_hours": gpu_hours}
    return Config.model_validate({"run": run, "critic": {"epochs": 20}})


def execute(config: Config):
    return run_pipeline(config, stages=table.STAGES, table=table.NAME, preload=(), pause=0.05)


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def test_own_gpus_are_added_and_shared_ones_are_counted_once():
    uses = [
        Use(0, 2 * HOUR, own=1, shared=4),
        Use(HOUR, 3 * HOUR, own=2, shared=4),  # beside the first
        Use(HOUR, 1.5 * HOUR, own=0, shared=4),  # inside of both
        Use(9 * HOUR, 10 * HOUR, own=0, shared=4),  # after a wait, which is not counted
    ]
    assert gpu_hours(uses) == gpu_hours(uses[::-1]) == 2 * 1 + 2 * 2 + (3 + 1) * 4
    assert gpu_hours([]) == 0


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (1, 2)),
        ({"CUDA_AGENT_ENGINE_SERVERS": "http://a:8000"}, (1, 2 + 4)),
        ({"CUDA_AGENT_RAY_PODS": "3"}, (1 + 3 * 8, 2)),
    ],
)
def test_the_chart_counts_the_gpus_of_a_pod(monkeypatch, variables, expected):
    for name in ("CUDA_AGENT_ENGINE_SERVERS", "CUDA_AGENT_RAY_PODS"):
        monkeypatch.delenv(name, raising=False)
    counts = {"stage": 1, "ray": 8, "sandboxes": 2, "engines": 4}
    for name, text in ({"CUDA_AGENT_GPUS": json.dumps(counts)} | variables).items():
        monkeypatch.setenv(name, text)
    assert gpus() == expected


def test_a_run_ends_at_a_checkpoint_when_its_budget_is_used_and_a_higher_one_goes_on(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("CUDA_AGENT_GPUS", ONE_GPU)
    journal.misbehave(cache, "train", "wait")  # in its sixth step it waits until it is told to stop
    low = settings(tmp_path, 0.5 / HOUR)
    outcome = execute(low)
    assert (outcome.code, outcome.stage) == (76, "train")
    assert "GPU-hours (run.gpu_hours)" in outcome.message and "Traceback" not in outcome.message
    store = open_store(tmp_path / "store")
    (run,) = runs.list_runs(store)
    assert run.status == "budget spent"
    steps = [line for line in journal.read(cache) if line.startswith("step")]
    assert steps and journal.read(cache).count("train") == 1, "it is not tried again"

    same = execute(low)
    assert (same.code, same.run) == (76, outcome.run)
    assert journal.read(cache).count("train") == 1, "a stage without budget does not begin"

    higher = execute(settings(tmp_path, 1.0))
    assert higher.code == 0 and higher.run != outcome.run
    assert higher.manifests["train"].resumed == [int(steps[-1].split()[1])]
    in_peace = execute(settings(tmp_path / "peace", None))
    assert higher.manifests["train"].outputs == in_peace.manifests["train"].outputs


def test_a_run_without_a_budget_keeps_no_records(tmp_path, cache):
    outcome = execute(settings(tmp_path, None))
    assert outcome.code == 0 and not open_store(tmp_path / "store").list(f"runs/{outcome.run}/gpus")


def test_an_attempt_that_was_cut_is_counted_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_AGENT_GPUS", ONE_GPU)
    monkeypatch.setattr(budget, "RECORD_SECONDS", 0.01)
    uri = str(tmp_path / "store")
    with pytest.raises(KeyError, match="cut"), metered(uri, "run", "train", 1.0) as is_spent:
        assert not is_spent()
        raise KeyError("cut")
    (entry,) = open_store(uri).list("runs/run/gpus")
    use = json.loads(open_store(uri).get(entry))
    assert use["own"] == 1 and use["ended"] > use["began"]
    open_store(uri).put(entry, json.dumps(use | {"ended": use["began"] + HOUR}).encode())
    with pytest.raises(BudgetSpent, match="The run has used 1 of 1 GPU-hours"), metered(uri, "run", "side", 1.0):
        raise AssertionError("it begins")


def test_a_fault_is_tried_again_while_budget_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_AGENT_GPUS", ONE_GPU)
    with pytest.raises(TryAgain, match="lost"), metered(str(tmp_path / "store"), "run", "train", 1.0):
        raise TryAgain("the GPU was lost")
