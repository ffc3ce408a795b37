"""The record of a run: the same tags and states from one machine and from pods."""

from dataclasses import replace

import pytest

from cuda_agent.config import Config
from cuda_agent.errors import EXIT_BUG, EXIT_DONE, EXIT_RETRY
from cuda_agent.pipeline import recorder
from cuda_agent.pipeline.graph import STAGES
from cuda_agent.pipeline.manifest import Manifest
from cuda_agent.storage import open_store
from cuda_agent.tracking import MANIFEST_TAG, POLICY_TAG


class Taken:
    """Stands in for MLflow's mirror and keeps what it is told."""

    def __init__(self, *args):
        self.told = []

    def update(self, stage, **facts):
        self.told.append((stage, facts))

    def close(self, timeout):
        return True


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "Mirror", Taken)
    store = open_store(str(tmp_path / "store"))
    made = recorder.Recorder("http://mlflow", store, Config(), "0" * 64, "a", STAGES, print)
    yield store, made
    assert made.close(1.0)


def test_a_finished_stage_has_its_manifest_notes_and_settings(record, tmp_path):
    store, made = record
    said = tmp_path / "said"
    said.mkdir()
    (said / "notes.jsonl").write_text('{"text": "a fallback was taken"}\n')
    manifest = Manifest("rft", "a", "key", "code", "env", None, "0" * 64, {}, {}, store.put_folder(said), 2.5, "now")
    assert made.finished("rft", manifest) == ["a fallback was taken"]
    stage, facts = made._mirror.told[-1]
    assert (stage, facts["status"]) == ("rft", "FINISHED")
    assert Manifest.from_bytes(facts["tags"][MANIFEST_TAG].encode()) == manifest
    assert facts["tags"]["notes"] == "a fallback was taken" and facts["tags"]["made by"] == "a"
    assert "rft.lr" in facts["params"] and "critic.lr" not in facts["params"]
    made.finished("critic", replace(manifest, stage="critic"))
    shown = made._mirror.told[-1][1]["params"]
    assert "critic.lr" in shown and "agentic.reward" in shown and "agentic.steps" not in shown


@pytest.mark.parametrize(("code", "status"), [(EXIT_RETRY, "KILLED"), (EXIT_BUG, "FAILED"), (EXIT_DONE, "FINISHED")])
def test_an_exit_code_is_a_state(record, code, status):
    _, made = record
    made.ended(code)
    assert made._mirror.told[-1] == (None, {"status": status})


def test_the_scores_of_an_evaluation_are_metrics_of_the_run_with_a_step_for_each_policy(record, tmp_path):
    store, made = record
    (tmp_path / "said").mkdir()
    said = store.put_folder(tmp_path / "said")
    manifest = Manifest("evaluate-base", "a", "key", "code", "env", None, "0" * 64, {}, {}, said, 2.5, "now")
    made.finished("evaluate-base", replace(manifest, scores={"passed": 0.25}))
    stage, told = made._mirror.told[-1]
    assert stage is None and told["metrics"][0] == {"score/passed": 0.25} and told["tags"] == {POLICY_TAG: "base"}
    for policy, passed in (("agentic", 0.75), ("rft", 0.5)):
        scores = {"passed": passed, "speedup_eager": 1.5}
        made.finished(f"evaluate-{policy}", replace(manifest, stage=f"evaluate-{policy}", scores=scores))
    _, told = made._mirror.told[-1]
    assert told["tags"] == {POLICY_TAG: "agentic"}, "the last one of the graph, whatever ended last"
    assert [(step, values["score/passed"]) for step, values in sorted(told["metrics"].items())] == [
        (0, 0.25), (3, 0.5), (4, 0.75),
    ]  # fmt: skip
    assert told["metrics"][4]["score/speedup_eager"] == 1.5


def test_without_mlflow_nothing_is_done(tmp_path):
    store = open_store(str(tmp_path / "store"))
    made = recorder.Recorder("off", store, Config(), "0" * 64, "a", STAGES, print)
    made.running("rft", tmp_path)
    made.failed("rft", EXIT_BUG)
    made.ended(EXIT_BUG)
    assert made.close(0.0)
