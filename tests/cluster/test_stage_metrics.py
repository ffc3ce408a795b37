"""What Prometheus reads from a stage's pod: progress, lost episodes and the newest metrics, over real HTTP."""

import os

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cuda_agent.cluster import stage_metrics
from cuda_agent.config import Config
from cuda_agent.pipeline.runs import Run
from cuda_agent.storage import open_store
from cuda_agent.tracking import FileTracker
from tests.ports import free_port


@pytest.fixture
def store(tmp_path):
    made = open_store(tmp_path / "store")
    made.create("runs/a/run.json", Run.begun("a", Config(), "0" * 64, "ada").to_bytes())
    return made


def scraped(port: int) -> dict[str, float]:
    """Name of a metric, with its label ``name`` if it has one -> value; checks the other labels."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").raise_for_status().text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.items() >= {"run": "a", "stage": "agentic", "submitter": "ada"}.items()
            found["/".join(filter(None, [sample.name, sample.labels.get("name")]))] = sample.value
    return found


def test_a_stage_serves_what_its_tracker_wrote(tmp_path, store, monkeypatch):
    port = free_port()
    monkeypatch.setenv(stage_metrics.PORT, str(port))
    scratch = tmp_path / "scratch"
    tracker = FileTracker(scratch)
    (scratch / "pid").touch()
    os.utime(scratch / "pid", (100, 100))
    with stage_metrics.serving(scratch, store, "a", "agentic"):
        before = scraped(port)
        tracker.log(0, {"reward": 1.0, "lost": 2.0})
        tracker.log(1, {"reward": 1.5, "lost": 1.0})
        tracker.progress(2, 5)
        for number, name in enumerate(("progress.json", "metrics.jsonl"), 2):
            os.utime(scratch / name, (number * 100, number * 100))
        after = scraped(port)
    assert before == {
        "cuda_agent_stage_done": 0, "cuda_agent_stage_units": 0, "cuda_agent_stage_lost_episodes": 0,
        "cuda_agent_stage_progress_timestamp_seconds": 100,
    }  # fmt: skip
    assert after == {
        "cuda_agent_stage_done": 2, "cuda_agent_stage_units": 5, "cuda_agent_stage_lost_episodes": 3,
        "cuda_agent_stage_progress_timestamp_seconds": 300,
        "cuda_agent_stage_metric/reward": 1.5, "cuda_agent_stage_metric/lost": 1,
    }  # fmt: skip
    with pytest.raises(httpx.ConnectError):
        scraped(port)


def test_without_a_port_nothing_is_served(tmp_path, store, monkeypatch):
    monkeypatch.delenv(stage_metrics.PORT, raising=False)
    monkeypatch.setattr("prometheus_client.start_http_server", lambda *_, **__: pytest.fail("it was started"))
    with stage_metrics.serving(tmp_path, store, "a", "agentic"):
        pass
