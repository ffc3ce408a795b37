"""The whole product, every stage real, by its command line: one run in peace, one that is killed again and again.

With the model clock both must end with the same bytes.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cuda_agent.pipeline import runs
from cuda_agent.pipeline.graph import STAGES
from cuda_agent.storage import open_store
from cuda_agent.tracking import read_metrics

pytestmark = pytest.mark.nightly
AT_WAR = ("agentic", "evaluate-agentic", "report")
COMMAND = [sys.executable, "-m", "cuda_agent.cli", "run", "experiment=smoke", "--json"]


def start(home: Path, *overrides: str) -> subprocess.Popen:
    home.mkdir(parents=True, exist_ok=True)
    command = [*COMMAND, f"run.store={home / 'store'}", *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=open(home / "said.txt", "a"), text=True)


def finish(home: Path, *overrides: str) -> dict:
    running = start(home, *overrides)
    answer, _ = running.communicate(timeout=1800)
    assert running.returncode == 0, (home / "said.txt").read_text()[-3000:]
    return json.loads(answer)


def wait_for(home: Path, running: subprocess.Popen, pattern: str) -> None:
    """Until a file of this pattern is there."""
    wait_until(lambda: next(home.glob(pattern), None) is not None, home, running)


def wait_until(true: Callable[[], bool], home: Path, running: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and running.poll() is None:
        if true():
            return
        time.sleep(0.01)
    raise AssertionError(f"it never came: {(home / 'said.txt').read_text()[-3000:]}")


@pytest.fixture(scope="module")
def peace(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """The folder of one undisturbed run, and its answer."""
    home = tmp_path_factory.mktemp("peace")
    return home, finish(home, f"run.mlflow=sqlite:///{home}/mlflow.db")


def test_every_stage_runs_and_the_report_is_there(peace: tuple[Path, dict]) -> None:
    _, answer = peace
    assert list(answer["stages"]) == [stage.name for stage in STAGES]
    page = Path(answer["report"])
    assert "<html" in page.read_text()[:500].lower() and (page.parent / "report.json").exists()


def test_the_episodes_are_there_token_by_token(peace: tuple[Path, dict]) -> None:
    home, answer = peace
    ask = [sys.executable, "-m", "cuda_agent.cli", "episodes", answer["run"], f"--store={home / 'store'}"]
    rows = json.loads(subprocess.check_output([*ask, "--json", f"--output={home / 'episodes.html'}"]))
    assert {row["stage"] for row in rows} == {"collect", *(s.name for s in STAGES if s.name.startswith("evaluate-"))}
    page = (home / "episodes.html").read_text()
    assert page.count('<article class="episode"') == len(rows)
    assert "&lt;tool_call&gt;" in page and "<function=" not in page, "the policy's tokens, by its own tokenizer"


def test_the_same_command_again_comes_from_the_cache(peace: tuple[Path, dict]) -> None:
    home, answer = peace
    again = finish(home, f"run.mlflow=sqlite:///{home}/mlflow.db")
    assert again["stages"] == answer["stages"] and again["run"] != answer["run"]
    assert "running" not in (home / "said.txt").read_text().split(again["run"])[1]


def test_mlflow_holds_the_run_with_its_curves(peace: tuple[Path, dict]) -> None:
    from mlflow import MlflowClient

    home, answer = peace
    client = MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow.db")
    experiment = client.get_experiment_by_name("smoke")
    (parent,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{answer['run']}'")
    assert parent.info.status == "FINISHED" and parent.data.params["sandbox.clock"] == "model"
    query = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    children = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id], query)}
    assert set(children) == {stage.name for stage in STAGES}
    assert all(child.info.status == "FINISHED" for child in children.values())
    scores = children["evaluate-agentic"].data.metrics
    assert scores["score/passed"] == parent.data.metrics["score/passed"], "the row shows the last policy"
    assert parent.data.tags["policy"] == "agentic, model clock"
    steps = [point.step for point in client.get_metric_history(parent.info.run_id, "score/passed")]
    assert len(steps) == len({stage.name for stage in STAGES if stage.about}) == len(set(steps))
    history = client.get_metric_history(children["agentic"].info.run_id, "reward")
    assert len({point.step for point in history}) == len(history) > 1
    assert {"config.json", "index.html"} <= {item.path for item in client.list_artifacts(parent.info.run_id)}


def begin_where_the_agent_is_trained(peace: Path, home: Path) -> None:
    """What comes before is served from the cache, and nothing is compiled twice."""
    before = [stage.name for stage in STAGES if stage.name not in AT_WAR]
    for part in ("cas", "configs", *(f"cache/{name}" for name in before)):
        shutil.copytree(peace / "store" / part, home / "store" / part)
    shutil.copytree(peace / "cache" / "sandbox" / "builds", home / "cache" / "sandbox" / "builds")


def test_a_run_killed_at_three_places_ends_with_the_same_bytes(peace: tuple[Path, dict], tmp_path: Path) -> None:
    calm_home, answer = peace
    home, off = tmp_path / "war", "run.mlflow=off"
    begin_where_the_agent_is_trained(calm_home, home)

    running = start(home, off)
    wait_for(home, running, "store/checkpoints/agentic/*/*.json")
    pid = next(home.glob("work/*/agentic/pid"))
    first = pid.read_text()
    os.kill(int(first), signal.SIGKILL)  # one stage, in the middle of training: the same call goes on
    wait_until(lambda: pid.exists() and pid.read_text() not in ("", first), home, running)
    running.kill()  # the whole run, in the stage's second attempt
    running.wait()

    running = start(home, off)
    wait_for(home, running, "work/*/evaluate-agentic/pid")
    running.kill()  # the whole run again, in an evaluation
    running.wait()

    survivor = finish(home, off)
    assert survivor["resumed"]
    outputs, expected = ({n: f["outputs"] for n, f in a["stages"].items()} for a in (survivor, answer))
    assert outputs == expected
    war, calm = (
        (store, runs.run_manifests(store, runs.list_runs(store)[0], STAGES))
        for store in (open_store(home / "store"), open_store(calm_home / "store"))
    )
    assert len(runs.list_runs(war[0])) == 1
    assert len(war[1]["agentic"].resumed) == 1
    for name in war[1]:
        steps = []
        for which, (store, manifests) in (("war", war), ("calm", calm)):
            store.get_folder(manifests[name].metrics, tmp_path / "said" / name / which)
            steps.append(list(read_metrics(tmp_path / "said" / name / which / "metrics.jsonl")))
        assert steps[0] == steps[1], "no step is missing and none is there twice"
