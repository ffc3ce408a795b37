"""What a run on a cluster leaves in a real MLflow server, and what is fetched: report, logs, what is compared."""

import gzip
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from drill import journal, table

from cuda_agent.cluster import pod, results, traces
from cuda_agent.compose import freeze
from cuda_agent.config import Config
from cuda_agent.errors import ConfigError
from cuda_agent.pipeline import compare, episodes, runs, trace
from cuda_agent.pipeline.graph import STAGES
from cuda_agent.pipeline.manifest import Manifest
from cuda_agent.storage import open_store
from tests.mlflow_server import serving
from tests.pages.report_inputs import make_inputs


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[results.Server]:
    with serving(tmp_path_factory.mktemp("mlflow")) as address:
        yield results.Server(address)


def left(server: results.Server, run: str, folder: Path) -> None:
    """A run's report, left in MLflow by a mirror as ``finish`` leaves it."""
    config = Config()
    here = pod.PodEnvironment(str(folder / "store"), server.address, folder / "c", folder / "p", folder)
    (folder / "report" / "assets").mkdir(parents=True)
    (folder / "report" / "index.html").write_text(f"<p>{run}</p>")
    (folder / "report" / "report.json").write_text("{}")
    (folder / "report" / "assets" / "a.svg").write_text("<svg/>")
    (folder / traces.PACKED).write_text("")
    with pod._recording(here, open_store(here.store), config, freeze(config)[1], run, STAGES) as recorder:
        recorder.attach(folder / "report")
        recorder.attach(folder / traces.PACKED)
        recorder.ended(0)
        assert recorder.close(60)


def test_a_report_is_fetched_whole(server, tmp_path):
    left(server, "one", tmp_path / "one")
    left(server, "two", tmp_path / "two")
    folder = results.download(server, "two", tmp_path / "fetched")
    assert (folder / "index.html").read_text() == "<p>two</p>"
    assert (folder / "assets" / "a.svg").read_text() == "<svg/>" and (folder / "config.json").exists()
    assert not (folder / traces.PACKED).exists()


def test_finish_leaves_the_trace_beside_the_report(server, tmp_path, monkeypatch):
    @contextmanager
    def reached(cluster):
        yield server

    config = Config.model_validate({"run": {"store": str(tmp_path / "local"), "mlflow": "off"}})
    here = pod.PodEnvironment(str(tmp_path / "store"), server.address, tmp_path / "c", tmp_path / "p", tmp_path)
    text, sha256 = freeze(config)
    here.config.write_text(text)
    pod.prepare(here, "traced", sha256, "traced", None, [], table.STAGES)
    pod.finish(here, "traced", sha256, "traced", "Failed", None, table.STAGES)
    monkeypatch.setattr(results, "mlflow", reached)
    monkeypatch.setattr(results, "workflows", lambda cluster, run: [])
    id, spans = results.trace(SimpleNamespace(), "traced")
    assert id == trace.trace_id(open_store(here.store), "traced")
    assert [span.name for span in spans] == ["prepare"]


def test_a_run_without_a_report_and_a_run_that_nobody_knows_are_said_so(server, tmp_path):
    config = Config()
    here = pod.PodEnvironment(str(tmp_path / "store"), server.address, tmp_path / "c", tmp_path / "p", tmp_path)
    with pod._recording(here, open_store(here.store), config, freeze(config)[1], "begun", STAGES):
        pass
    with pytest.raises(ConfigError, match="Run begun has no report yet"):
        results.download(server, "begun", tmp_path / "a")
    with pytest.raises(ConfigError, match="MLflow knows no run nobody"):
        results.download(server, "nobody", tmp_path / "a")
    assert not (tmp_path / "a").exists()


def in_pods(
    server: results.Server, folder: Path, run: str, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Config, int]:
    """The drill's graph as pods run it, as far as it goes; its configuration, and the last exit code."""
    config = Config.model_validate({"critic": {"epochs": epochs}})
    text, sha256 = freeze(config)
    monkeypatch.setenv("CUDA_AGENT_HOME", str(folder / "home"))
    (folder / "home" / "cache").mkdir(parents=True, exist_ok=True)
    here = pod.PodEnvironment(
        str(folder / "store"), server.address, folder / f"{run}.json", folder / "plan", folder / "work"
    )
    here.config.write_text(text)
    plan = pod.prepare(here, run, sha256, run, None, [], table.STAGES)
    script = (
        "import sys; from pathlib import Path; from cuda_agent.cluster import pod; from drill import table\n"
        f"here = pod.PodEnvironment({here.store!r}, {server.address!r}, work=Path({str(here.work)!r}))\n"
        f"sys.exit(pod.run_stage(here, sys.argv[1], {run!r}, {sha256!r}, table.NAME))"
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(Path(__file__).parents[2] / part) for part in ("", "tests/pipeline")),
    }  # fmt: skip
    code = 0
    for row in table.STAGES:
        if plan[row.name] == "run":
            done = subprocess.run([sys.executable, "-c", script, row.name], env=environment, capture_output=True)
            code = done.returncode
            if code:
                break
    pod.finish(here, run, sha256, run, "Failed" if code else "Running", None, table.STAGES)
    return config, code


@pytest.mark.nightly
def test_two_runs_are_compared_by_what_they_left_and_as_their_store_compares_them(server, tmp_path, monkeypatch):
    for run, epochs in (("cmp-a", 2), ("cmp-b", 3)):
        assert in_pods(server, tmp_path, run, epochs, monkeypatch)[1] == 0
    store = open_store(tmp_path / "store")
    there = [results.facts(server, run) for run in ("cmp-a", "cmp-b")]
    here = [compare.facts(store, runs.read_run(store, run), table.STAGES) for run in ("cmp-a", "cmp-b")]
    assert [item.manifests for item in there] == [item.manifests for item in here]
    assert [item.settings for item in there] == [item.settings for item in here]
    found = compare.diff(*there)
    assert found["config"] == {"critic.epochs": [2, 3]} and "make" not in found["stages"]
    assert found == compare.diff(*here) and "train" in found["stages"]
    with pytest.raises(ConfigError, match="MLflow knows no run nobody"):
        results.facts(server, "nobody")


def test_the_scores_of_runs_and_the_runs_of_a_sweep_are_read_from_mlflow(server, tmp_path):
    (tmp_path / "said").mkdir()
    store = open_store(tmp_path / "store")
    here = pod.PodEnvironment(str(tmp_path / "store"), server.address, tmp_path / "c", tmp_path / "p", tmp_path)
    for run, seed in (("s-1", 1), ("s-2", 2)):
        config = Config.model_validate({"seed": seed, "run": {"name": run, "sweep": "s"}})
        with pod._recording(here, store, config, freeze(config)[1], run, STAGES) as recorder:
            for policy, passed in (("base", 0.25), ("agentic", seed / 4)):
                made = Manifest(
                    f"evaluate-{policy}", run, "k", "c", "e", None, "f", {}, {}, store.put_folder(tmp_path / "said"),
                    1.0, "now", scores={"passed": passed},
                )  # fmt: skip
                recorder.finished(made.stage, made)
            assert recorder.close(60)
    found = results.scores(server)
    assert found["s-1"] == ("agentic", {"passed": 0.25}) and found["s-2"] == ("agentic", {"passed": 0.5})
    rows = compare.sweep_rows(results.sweep(server, "s"))
    assert [(row["run"], row["settings"], row["scores"]) for row in rows] == [
        ("s-1", {"seed": 1}, {"passed": 0.25}),
        ("s-2", {"seed": 2}, {"passed": 0.5}),
    ]
    assert results.sweep(server, "nosuch") == [] == results.sweep(server, "s' or 1")


def test_the_log_of_a_stage_that_failed_is_kept_and_its_status_too(server, tmp_path, monkeypatch):
    (tmp_path / "home" / "cache").mkdir(parents=True)
    journal.misbehave(tmp_path / "home" / "cache", "make", "bug")
    _, code = in_pods(server, tmp_path, "broken", 2, monkeypatch)
    assert code == 1 and any("ZeroDivisionError" in line for line in results.log(server, "broken", "make"))
    assert results.logged(server, "broken") == ["make"]
    assert results._open(server, "broken")[1]["make"].status == "FAILED"
    with pytest.raises(ConfigError, match="Run broken has not run train"):
        results.log(server, "broken", "train")


def test_what_mlflow_missed_is_told_by_finish(server, tmp_path, monkeypatch):
    """The pod of the stage wrote its log into the store and could not reach MLflow."""
    config = Config()
    text, sha256 = freeze(config)
    here = pod.PodEnvironment(str(tmp_path / "store"), server.address, tmp_path / "c", tmp_path / "plan", tmp_path)
    here.config.write_text(text)
    pod.prepare(here, "deaf", sha256, "deaf", None, [], table.STAGES)
    open_store(here.store).put("runs/deaf/make/log.txt", b"what it said\n")
    pod.finish(here, "deaf", sha256, "deaf", "Failed", None, table.STAGES)
    assert results.log(server, "deaf", "make") == ["what it said"]


@pytest.mark.nightly
def test_the_log_of_a_stage_from_the_cache_is_with_the_run_that_made_it(server, tmp_path, monkeypatch):
    in_pods(server, tmp_path, "maker", 2, monkeypatch)
    in_pods(server, tmp_path, "served", 2, monkeypatch)
    assert isinstance(results.log(server, "maker", "train"), list)
    with pytest.raises(ConfigError, match="run maker made it and has its log"):
        results.log(server, "served", "train")
    assert "train" in results.logged(server, "maker") and "train" not in results.logged(server, "served")


def test_the_episodes_of_a_stage_are_fetched_also_where_the_cache_served_it(server, tmp_path, monkeypatch):
    inputs = make_inputs(tmp_path)
    store = open_store(tmp_path / "store")
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "tokenizer.json").write_text("{}")
    made = Manifest(
        stage="evaluate-rft", run="player", key="k", code="c", environment="e", device=None, config="c" * 64,
        inputs={"policy": store.put_folder(tmp_path / "policy")},
        outputs={"scores": store.put_folder(inputs["scores-rft"])}, metrics="m", seconds=1.0, finished="",
    )  # fmt: skip
    config = Config()
    here = pod.PodEnvironment(str(tmp_path / "store"), server.address, tmp_path / "c", tmp_path / "p", tmp_path)
    files = episodes.packed(store, made, tmp_path / "packed")
    for run, told in (("player", {"artifacts": files}), ("again", {})):
        with pod._recording(here, store, config, freeze(config)[1], run, STAGES) as recorder:
            assert recorder._mirror is not None
            recorder._mirror.update("evaluate-rft", tags={"made by": "player"}, **told)
            assert recorder.close(60)
        (left,) = results.episodes(server, run, tmp_path / run)
        assert left.stage == "evaluate-rft" and left.tokenizer is not None
        whole = (inputs["scores-rft"] / "episodes.jsonl").read_bytes()
        assert left.file.read_bytes() == whole and len(episodes.listed([left])) == 30
    monkeypatch.setattr(episodes, "MOST_BYTES", 20_000)
    (file, _) = episodes.packed(store, made, tmp_path / "few")
    few = gzip.decompress(file.read_bytes())
    assert 5_000 < len(few) <= 20_000 and whole.endswith(few) and few.startswith(b'{"id":'), "the newest, whole ones"
    assert episodes.packed(store, replace(made, outputs={"policy": made.inputs["policy"]}), tmp_path / "none") == []


def test_a_name_never_becomes_part_of_a_query(server):
    with pytest.raises(ConfigError, match="MLflow knows no run x' or"):
        results.facts(server, "x' or 1 = 1 or tags.a = '")
