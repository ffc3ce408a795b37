"""What runs inside of a cluster's pods, in real processes on a folder store: the same results as on one machine."""

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drill import journal, table
from typer.testing import CliRunner

from cuda_agent.cli import main
from cuda_agent.cluster import pod, pod_maintenance
from cuda_agent.cluster.pod import PodEnvironment
from cuda_agent.compose import compose, freeze, section_values
from cuda_agent.config import Config
from cuda_agent.errors import ConfigError, TryAgain
from cuda_agent.pipeline import runs
from cuda_agent.pipeline.local import run_pipeline
from cuda_agent.pipeline.manifest import config_entry, is_whole, outcome_entry, read_manifest
from cuda_agent.storage import open_store

DRILL = Path(__file__).parents[1] / "pipeline"
ROOT = DRILL.parents[1]


def settings(tmp_path: Path, epochs: int = 8) -> Config:
    return Config.model_validate(
        {"run": {"store": str(tmp_path / "local"), "mlflow": "off"}, "critic": {"epochs": epochs}}
    )


@pytest.fixture
def here(tmp_path, monkeypatch) -> PodEnvironment:
    """A pod's surroundings, and a cache in which the drill's stages write their journal."""
    monkeypatch.setenv("CUDA_AGENT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUDA_AGENT_WEBHOOK", raising=False)
    (tmp_path / "home" / "cache").mkdir(parents=True)
    return PodEnvironment(
        store=str(tmp_path / "store"),
        mlflow="off",
        config=tmp_path / "config.json",
        plan=tmp_path / "work" / "plan",
        work=tmp_path / "work",
        termination_message=tmp_path / "termination-log",
    )


def submitted(here: PodEnvironment, config: Config) -> str:
    text, sha256 = freeze(config)
    here.config.write_text(text)
    return sha256


def prepare(here: PodEnvironment, sha256: str, run: str = "a") -> dict[str, str]:
    return pod.prepare(here, run, sha256, run, None, [], table.STAGES)


def stage(here: PodEnvironment, name: str, sha256: str, run: str = "a") -> subprocess.Popen:
    """In a process of its own, as in a pod; what it needs to know comes from the environment."""
    script = (
        "import sys; from dataclasses import replace; from pathlib import Path\n"
        "from cuda_agent.cluster import pod; from drill import table\n"
        "here = pod.PodEnvironment.from_environment()\n"
        f"here = replace(here, work=Path({str(here.work)!r}))\n"
        f"here = replace(here, termination_message=Path({str(here.termination_message)!r}))\n"
        f"sys.exit(pod.run_stage(here, {name!r}, {run!r}, {sha256!r}, table.NAME))"
    )
    environment = os.environ | {
        "CUDA_AGENT_STORE": here.store,
        "CUDA_AGENT_MLFLOW": here.mlflow,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{DRILL}",
    }
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(here: PodEnvironment, sha256: str, status: str = "Running", run: str = "a") -> dict:
    return pod.finish(here, run, sha256, run, status, None, table.STAGES)


def whole_run(here: PodEnvironment, sha256: str, run: str = "a") -> dict[str, str]:
    plan = prepare(here, sha256, run)
    for row in table.STAGES:
        if plan[row.name] == "run":
            process = stage(here, row.name, sha256, run)
            said = process.communicate(timeout=120)
            assert process.returncode == 0, said
    if plan["finish"] == "run":
        finish(here, sha256, run=run)
    return plan


def outputs(here: PodEnvironment, run: str = "a") -> dict[str, dict[str, str]]:
    store = open_store(here.store)
    manifests = {row.name: read_manifest(store, run, row.name) for row in table.STAGES}
    return {name: manifest.outputs for name, manifest in manifests.items() if manifest}


def steps(tmp_path: Path) -> list[int]:
    lines = journal.read(tmp_path / "home" / "cache")
    return [int(line.split()[1]) for line in lines if line.startswith("step")]


def test_the_pods_give_the_same_bytes_as_one_machine(tmp_path, here):
    config = settings(tmp_path)
    plan = whole_run(here, submitted(here, config))
    assert set(plan.values()) == {"run", ""}
    alone = run_pipeline(config, stages=table.STAGES, table=table.NAME, preload=(), pause=0.05)
    expected = {name: manifest.outputs for name, manifest in alone.manifests.items()}
    found = outputs(here)
    assert found.keys() == expected.keys()
    same = {name for name in expected if found[name] == expected[name]}
    # The report of this graph quotes the manifests, which say who made what, and when.
    assert same >= expected.keys() - {"report"}


def test_prepare_enters_the_run_and_writes_an_output_for_every_task(tmp_path, here):
    sha256 = submitted(here, settings(tmp_path))
    plan = prepare(here, sha256)
    assert {path.name: path.read_text() for path in here.plan.iterdir()} == plan
    assert plan == {row.name: "run" for row in table.STAGES} | {"servers": "", "engines": "", "finish": "run"}
    store = open_store(here.store)
    assert store.exists(config_entry(sha256)) and runs.read_run(store, "a").status == "unfinished"


def test_prepare_can_be_repeated(tmp_path, here):
    sha256 = submitted(here, settings(tmp_path))
    before = prepare(here, sha256), runs.read_run(open_store(here.store), "a")
    assert before == (prepare(here, sha256), runs.read_run(open_store(here.store), "a"))


def test_a_run_that_was_made_before_needs_no_stage_and_no_finish(tmp_path, here):
    sha256 = submitted(here, settings(tmp_path))
    whole_run(here, sha256)
    made = outputs(here)
    plan = prepare(here, sha256, run="b")
    assert plan == {row.name: "cached" for row in table.STAGES} | {"servers": "", "engines": "", "finish": "no"}
    assert outputs(here, "b") == made and runs.read_run(open_store(here.store), "b").status == "done"


def test_only_what_a_change_concerns_runs_again(tmp_path, here):
    whole_run(here, submitted(here, settings(tmp_path)))
    plan = prepare(here, submitted(here, settings(tmp_path, epochs=9)), run="b")
    readers = {row.name for row in table.STAGES if "critic" in row.config}
    assert readers and all(plan[name] == "run" for name in readers)
    assert plan["make"] == "cached"


def test_results_of_an_earlier_attempt_that_must_be_made_again_are_not_those_of_the_run(tmp_path, here, monkeypatch):
    sha256 = submitted(here, settings(tmp_path))
    whole_run(here, sha256)
    monkeypatch.setattr(pod, "serve_from_cache", lambda *_: None)  # as after an upgrade
    assert set(prepare(here, sha256).values()) == {"run", ""} and outputs(here) == {}
    entry = outcome_entry("a", table.STAGES[0].name)
    open_store(here.store).put(entry, json.dumps({"code": 79, "message": "missed"}).encode())
    ended = finish(here, sha256, status="Failed")
    assert (ended["code"], ended["stage"], ended["message"]) == (79, table.STAGES[0].name, "missed")


def test_a_configuration_that_is_not_what_was_submitted_is_refused(tmp_path, here):
    sha256 = submitted(here, settings(tmp_path))
    here.config.write_text(here.config.read_text().replace('"seed":0', '"seed":1'))
    with pytest.raises(ConfigError, match="it was changed"):
        prepare(here, sha256)


def test_a_configuration_may_come_from_the_store(tmp_path, here):
    sha256 = submitted(here, settings(tmp_path))
    prepare(here, sha256)
    here.config.unlink()
    assert prepare(here, sha256, run="b")["make"] == "run"


def test_a_configuration_that_has_not_arrived_is_waited_for(tmp_path, here):
    with pytest.raises(TryAgain):
        prepare(here, "ab" * 32)


def test_a_name_belongs_to_one_configuration(tmp_path, here):
    prepare(here, submitted(here, settings(tmp_path)))
    with pytest.raises(ConfigError, match="another configuration"):
        prepare(here, submitted(here, settings(tmp_path, epochs=9)))


def test_a_pod_that_is_told_to_end_writes_a_checkpoint_and_the_next_one_goes_on(tmp_path, here):
    sha256 = submitted(here, settings(tmp_path, epochs=40))
    prepare(here, sha256)
    process = stage(here, "make", sha256)
    process.communicate(timeout=60)
    journal.misbehave(tmp_path / "home" / "cache", "train", "wait")
    process = stage(here, "train", sha256)
    deadline = time.monotonic() + 60
    while len(steps(tmp_path)) < 5:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    before = len(steps(tmp_path))
    process = stage(here, "train", sha256)
    said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    took = steps(tmp_path)
    assert sorted(set(took)) == list(range(1, 41)) or sorted(set(took)) == list(range(40))
    assert len(took) - len(set(took)) <= 1, "at most one step is repeated"
    assert before < len(took)


@pytest.mark.parametrize(("how", "code", "status"), [("config", 78, "refused"), ("gate", 79, "gate missed")])
def test_a_stage_that_fails_keeps_its_code_and_message_and_finish_says_so(tmp_path, here, how, code, status):
    sha256 = submitted(here, settings(tmp_path))
    prepare(here, sha256)
    journal.misbehave(tmp_path / "home" / "cache", "make", how)
    here.termination_message.touch()
    process = stage(here, "make", sha256)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code and said.strip()
    store = open_store(here.store)
    outcome = json.loads(store.get(outcome_entry("a", "make")))
    assert outcome["code"] == code and outcome["message"] in said
    assert here.termination_message.read_text() == outcome["message"]
    facts = finish(here, sha256, status="Failed")
    assert (facts["code"], facts["stage"]) == (code, "make")
    assert runs.read_run(store, "a").status == status


def test_what_is_tried_again_leaves_no_last_words(tmp_path, here):
    """Argo's rule of what to retry reads them."""
    sha256 = submitted(here, settings(tmp_path))
    prepare(here, sha256)
    journal.misbehave(tmp_path / "home" / "cache", "make", "retry")
    here.termination_message.touch()
    process = stage(here, "make", sha256)
    process.communicate(timeout=60)
    assert process.returncode == 75 and here.termination_message.read_text() == ""


def test_a_run_that_was_stopped_is_interrupted_and_not_failed(tmp_path, here):
    sha256 = submitted(here, settings(tmp_path))
    prepare(here, sha256)
    assert finish(here, sha256, status="Failed")["code"] == 75
    assert runs.read_run(open_store(here.store), "a").status == "interrupted"


def refused(here: PodEnvironment, sha256: str, monkeypatch, run: str = "a") -> BaseException | None:
    """What ends the command that a pod runs for ``prepare``."""
    monkeypatch.setattr(PodEnvironment, "from_environment", lambda: here)
    command = ["pod", "prepare", "--config", sha256, "--workflow", run]
    return CliRunner().invoke(main.app, command, standalone_mode=False).exception


def test_finish_says_why_prepare_failed(tmp_path, here, monkeypatch):
    sha256 = submitted(here, settings(tmp_path))
    text = here.config.read_text()
    here.config.write_text(text.replace('"seed":0', '"seed":1'))
    here.termination_message.touch()
    error = refused(here, sha256, monkeypatch)
    assert isinstance(error, ConfigError) and here.termination_message.read_text() == str(error)
    for _ in range(2):  # finish may be started again
        facts = finish(here, sha256, status="Failed")
        assert (facts["code"], facts["stage"], facts["message"]) == (78, "prepare", str(error))
    here.config.write_text(text)
    prepare(here, sha256)
    assert finish(here, sha256, status="Failed")["message"].startswith("Stopped.")


def test_what_prepare_tries_again_is_known_to_finish_and_leaves_no_last_words(tmp_path, here, monkeypatch):
    here.termination_message.touch()
    error = refused(here, "ab" * 32, monkeypatch)
    assert isinstance(error, TryAgain) and here.termination_message.read_text() == ""
    facts = finish(here, "ab" * 32, status="Failed")
    assert (facts["code"], facts["message"]) == (75, str(error))


def test_a_bug_of_prepare_is_no_interruption(tmp_path, here, monkeypatch):
    sha256 = submitted(here, settings(tmp_path))
    monkeypatch.setattr(pod, "prepare", lambda *_, **__: 1 / 0)
    assert isinstance(refused(here, sha256, monkeypatch), ZeroDivisionError)
    facts = finish(here, sha256, status="Failed")
    assert (facts["code"], facts["message"]) == (1, "ZeroDivisionError: division by zero")


def test_a_run_of_another_configuration_keeps_its_end(tmp_path, here, monkeypatch):
    """A second Workflow took its name."""
    first = submitted(here, settings(tmp_path))
    prepare(here, first)
    finish(here, first)
    second = submitted(here, settings(tmp_path, epochs=9))
    assert "another configuration" in str(refused(here, second, monkeypatch))
    facts = finish(here, second, status="Failed")
    assert facts["code"] == 78 and "another configuration" in facts["message"]
    assert runs.read_run(open_store(here.store), "a").status == "done"
    assert finish(here, first, status="Failed")["code"] == 75, "the other one's failure is not the first one's"


def test_a_stages_log_is_printed_and_kept(tmp_path, here):
    sha256 = submitted(here, settings(tmp_path))
    prepare(here, sha256)
    journal.misbehave(tmp_path / "home" / "cache", "make", "bug")
    process = stage(here, "make", sha256)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" in shown and "make: begins" in shown
    assert "Traceback" in open_store(here.store).get("runs/a/make/log.txt").decode()


def test_the_servers_come_from_the_environment_and_the_configuration_stays(monkeypatch):
    from cuda_agent.pipeline.manifest import placed

    config = Config()
    assert placed(config) == config
    monkeypatch.setenv("CUDA_AGENT_SANDBOX_SERVERS", "http://a:1,http://b:2")
    assert placed(config).sandbox.servers == ["http://a:1", "http://b:2"]
    assert config.sandbox.servers == []


def test_engines_come_from_the_environment_and_where_they_are_is_no_part_of_a_key(monkeypatch):
    from cuda_agent.pipeline.manifest import placed

    config = compose(["policy.engine=vllm"])
    monkeypatch.setenv("CUDA_AGENT_ENGINE_SERVERS", "http://a:1,http://b:2")
    here = placed(config)
    assert here.policy.vllm.servers == ["http://a:1", "http://b:2"] and config.policy.vllm.servers == []
    assert section_values(here, ["policy"]) == section_values(config, ["policy"])
    assert section_values(compose(["policy.vllm.replicas=2"]), ["policy"]) != section_values(compose([]), ["policy"])


def test_the_webhook_is_told_how_it_ended_and_nobody_minds_when_it_is_deaf(tmp_path, here, monkeypatch, capsys):
    heard = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204 if len(heard) == 1 else 500)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    secret = f"http://127.0.0.1:{server.server_port}/secret-path"
    monkeypatch.setenv("CUDA_AGENT_WEBHOOK", secret)
    sha256 = submitted(here, settings(tmp_path))
    prepare(here, sha256)
    for _ in range(2):
        finish(here, sha256, status="Failed")
    monkeypatch.setenv("CUDA_AGENT_WEBHOOK", f"{secret}\n")  # as a secret that was made from a file
    finish(here, sha256, status="Failed")
    monkeypatch.setenv("CUDA_AGENT_WEBHOOK", "http://[secret-path")
    finish(here, sha256, status="Failed")
    server.shutdown()
    assert [facts["code"] for facts in heard] == [75, 75, 75] and heard[0]["run"] == "a"
    assert "secret-path" not in "".join(capsys.readouterr())


@pytest.mark.nightly
def test_mlflow_has_one_run_a_stage_however_often_a_pod_is_started(tmp_path, here):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    here = PodEnvironment(here.store, uri, here.config, here.plan, here.work)
    sha256 = submitted(here, settings(tmp_path))
    whole_run(here, sha256)
    finish(here, sha256)  # once more: a retry
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("cuda-agent")
    found = client.search_runs([experiment.experiment_id])
    names = sorted(run.data.tags["cuda_agent.stage"] for run in found)
    assert names == sorted(["", *(row.name for row in table.STAGES)])
    assert {run.info.status for run in found} == {"FINISHED"}


def test_a_run_waits_while_somebody_collects_garbage(tmp_path, here):
    sha256 = submitted(here, settings(tmp_path))
    store = open_store(here.store)
    store.put("locks/gc-other", b"")
    prepared: list[dict[str, str]] = []
    waiting = threading.Thread(target=lambda: prepared.append(prepare(here, sha256)))
    waiting.start()
    time.sleep(0.5)
    assert not store.exists("runs/a/run.json") and not prepared
    store.delete("locks/gc-other")
    waiting.join()
    assert prepared[0]["make"] == "run" and store.exists("runs/a/run.json")


def test_collecting_beside_a_live_run_leaves_it_all_that_it_needs(tmp_path, here, monkeypatch):
    """The run was submitted a month ago, and all its files are as old."""
    sha256 = submitted(here, settings(tmp_path))
    prepare(here, sha256)
    assert stage(here, "make", sha256).wait(60) == 0
    store = open_store(here.store)
    begun = replace(runs.read_run(store, "a"), created="2026-01-01T00:00:00+00:00")
    store.put("runs/a/run.json", begun.to_bytes())
    then = time.time() - 30 * 86400
    for file in Path(store.uri).rglob("*"):
        os.utime(file, (then, then))
    flows = {"a-r2": {"Status": "Running"}}
    maps = [{"name": "a-r2", "labels": {"cuda-agent.io/run": "a"}}]
    place: Any = SimpleNamespace(
        table=lambda kind, selector="": flows, metadata=lambda kind, selector: maps if kind == "ConfigMap" else []
    )
    found = pod_maintenance.collect(here, 1, 7.0, False, place)
    assert found["removed"] and found["runs"] == [] and "busy" not in found
    assert is_whole(store, read_manifest(store, "a", "make"))
    flows.clear()
    monkeypatch.setattr(place, "delete", lambda kind, name: None, raising=False)
    assert pod_maintenance.collect(here, 1, 7.0, False, place)["runs"] == ["a"]


def test_a_run_is_pinned_by_a_pod_and_a_missing_one_is_an_answer(tmp_path, here):
    prepare(here, submitted(here, settings(tmp_path)))
    assert pod_maintenance.pin(here, "a", True) == {"run": "a", "pinned": True}
    assert open_store(here.store).exists("runs/a/pin")
    assert pod_maintenance.pin(here, "a", False)["pinned"] is False and not open_store(here.store).exists("runs/a/pin")
    assert "there is no such run" in pod_maintenance.pin(here, "b", True)["error"]


def test_a_sandbox_reaches_what_listens_and_says_why_not_otherwise(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = f"127.0.0.1:{listening.getsockname()[1]}"
        pod_maintenance.tell([there, "127.0.0.1:1"], tmp_path / "log")
    said = json.loads((tmp_path / "log").read_text())
    assert said["reached"][there] == "" and "refused" in said["reached"]["127.0.0.1:1"]
    assert "process" in said["processes"]


@pytest.mark.parametrize(
    ("outside", "sandbox", "ok", "said"),
    [
        ("", "timed out", True, "a sandbox cannot connect"),
        ("", "", False, "a sandbox connected"),
        ("timed out", "", False, "a sandbox connected"),
        ("timed out", "timed out", False, "not even a run's own pod"),
    ],
)
def test_a_wall_counts_when_only_the_sandbox_fails(outside, sandbox, ok, said):
    check = pod_maintenance.wall("store", "10.0.0.1:9000", outside, sandbox)
    assert check.ok is ok and said in check.text and bool(check.mend) is not ok


def test_what_no_sandbox_may_reach_comes_from_the_surroundings(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    found = pod_maintenance.forbidden("http://127.0.0.2:5000")
    assert found.pop("DNS", "x:53").endswith(":53")
    assert found == {"API server": "10.96.0.1:443", "store": "127.0.0.1:9000", "MLflow": "127.0.0.2:5000"}
    assert "MLflow" not in pod_maintenance.forbidden("off")
