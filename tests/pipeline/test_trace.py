"""A run's trace: its spans in the store, and the critical path through them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from drill import journal, table
from typer.testing import CliRunner

from cuda_agent.cli import main
from cuda_agent.config import Config
from cuda_agent.pipeline import runs, trace
from cuda_agent.pipeline.local import run_pipeline
from cuda_agent.pipeline.trace import Node, Span, critical_path
from cuda_agent.storage import open_store

S = 1_000_000_000


def made(id: str, parent: str, name: str, start: float, end: float, **attributes) -> Span:
    return Span(id, parent, name, round(start * S), round(end * S), attributes)


def rows(node: Node) -> dict[str, tuple[float, int]]:
    """Path of names -> (seconds, number of spans)."""
    found = {}
    for name, row in node.rows.items():
        found |= {name: (row.total / S, row.count)}
        found |= {f"{name}/{below}": value for below, value in rows(row).items()}
    return found


def test_the_path_goes_back_from_the_end_through_the_span_that_ended_last():
    path = critical_path(
        [
            made("r", "", "run", 0, 10, kind="run"),
            made("a", "r", "stage", 1, 9, kind="stage"),
            made("p", "a", "play", 1, 5),
            made("e1", "p", "episode", 1, 3),
            made("e2", "p", "episode", 1.5, 4.5),
            made("e3", "p", "episode", 2, 4),  # ends earlier than e2, and so is not waited for
            made("l", "a", "learn", 5, 8),
        ],
        "a-run",
    )
    assert rows(path) == {
        "run": (10, 1),
        "run/stage": (8, 1),
        "run/stage/play": (4, 1),
        "run/stage/play/episode": (3.5, 2),
        "run/stage/learn": (3, 1),
    }
    assert path.total == 10 * S
    assert path.explained == pytest.approx(0.7), "1 s in the stage and 2 s in the run have no span"


def test_a_child_counts_only_inside_its_parent():
    """Clocks of two machines differ, and Argo's times are whole seconds."""
    children = [made("a", "r", "early", 0.5, 2), made("b", "r", "late", 2, 9)]
    path = critical_path([made("r", "", "pod", 1, 3), *children], "x")
    assert rows(path) == {"pod": (2, 1), "pod/early": (1, 1), "pod/late": (1, 1)}


def test_the_time_between_two_sessions_does_not_count():
    path = critical_path([made("r", "", "run", 0, 2, kind="run"), made("s", "", "run", 10, 13, kind="run")], "x")
    assert rows(path) == {"run": (5, 2)} and path.total == 5 * S and path.explained == 0


def test_a_parent_that_has_not_ended_is_replaced():
    path = critical_path([made("p", "gone", "play", 2, 5), made("l", "gone", "learn", 6, 7)], "x")
    assert rows(path) == {"unfinished": (5, 1), "unfinished/play": (3, 1), "unfinished/learn": (1, 1)}
    assert path.explained == pytest.approx(0.8)


def test_no_spans_have_an_empty_path():
    assert critical_path([], "x").total == 0


def test_small_rows_are_left_out_of_the_text():
    spans = [made("r", "", "run", 0, 100, kind="run"), made("a", "r", "a", 0, 99.9), made("b", "r", "b", 99.9, 100)]
    text = "\n".join(trace.lines(critical_path(spans, "x"), 3))
    assert text.startswith("x: 100.0 s, of which 3 spans explain 100.0%")
    assert " a" in text and " b" not in text


# --------------------------------------------------------------------------------------------------------- of real runs


def settings(tmp_path: Path) -> Config:
    return Config.model_validate({"run": {"store": str(tmp_path / "store"), "mlflow": "off"}, "critic": {"epochs": 4}})


def execute(config: Config, **options):
    return run_pipeline(config, stages=table.STAGES, table=table.NAME, preload=(), pause=0.05, **options)


def command(tmp_path: Path, *arguments: str):
    return CliRunner().invoke(main.app, ["trace", *arguments, "--store", str(tmp_path / "store"), "--on", "local"])


def names(node: dict) -> dict[str, dict]:
    return {row["name"]: row for row in node["rows"]}


def test_a_run_leaves_a_trace_of_every_process(tmp_path):
    (tmp_path / "cache").mkdir()
    outcome = execute(settings(tmp_path))
    done = command(tmp_path, "last", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["run"] == outcome.run and len(found["trace"]) == 32
    (run,) = found["path"]
    assert run["name"] == "run"
    stages = names(run)
    assert stages.keys() >= {"make", "train", "side", "twin", "report", "look up"}
    assert names(stages["train"]).keys() >= {"start process", "look up", "import", "save checkpoint", "store outputs"}
    attributes = {span["name"]: span["attributes"] for span in found["spans"]}
    assert attributes["run"] == {"kind": "run", "run": outcome.run, "trace": found["trace"], "code": 0}
    assert attributes["train"] == {"kind": "stage", "code": 0}
    text = command(tmp_path, "last").stdout
    assert text.startswith(f"{outcome.run}: ") and "    train" in text


def test_a_stage_from_the_cache_has_no_process(tmp_path):
    (tmp_path / "cache").mkdir()
    execute(settings(tmp_path))
    execute(settings(tmp_path))
    (run,) = json.loads(command(tmp_path, "last", "--json").stdout)["path"]
    assert names(run)["look up"]["count"] == 5 and "train" not in names(run)


def test_a_stage_that_is_killed_is_traced_beside_its_second_attempt(tmp_path):
    (tmp_path / "cache").mkdir()
    journal.misbehave(tmp_path / "cache", "train", "die-after-save")
    outcome = execute(settings(tmp_path))
    assert outcome.code == 0
    spans = json.loads(command(tmp_path, "last", "--json").stdout)["spans"]
    attempts = [span for span in spans if span["name"] == "train"]
    assert [span["attributes"]["code"] for span in attempts] == [75, 0]
    first = [span["name"] for span in spans if span["parent"] == attempts[0]["id"]]
    assert "save checkpoint" in first and "store outputs" not in first


@pytest.mark.nightly
def test_a_run_that_was_killed_whole_keeps_its_spans_and_its_trace(tmp_path):
    (tmp_path / "cache").mkdir()
    drill = Path(__file__).parent
    script = [sys.executable, "-m", "drill", str(tmp_path / "store"), "critic.epochs=4"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(drill), str(drill.parents[1])])}
    journal.hold(tmp_path / "cache")  # the run cannot be over before it is killed
    victim = subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, start_new_session=True)
    while "side" not in journal.read(tmp_path / "cache"):
        assert victim.poll() is None
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    during = json.loads(command(tmp_path, "last", "--json").stdout)
    assert {row["name"] for row in during["path"]} == {"unfinished"}, "from the files on this machine"
    journal.hold(tmp_path / "cache", False)
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    after = json.loads(command(tmp_path, "last", "--json").stdout)
    assert after["trace"] == during["trace"]
    assert {span["id"] for span in after["spans"]} > {span["id"] for span in during["spans"]}
    assert {row["name"] for row in after["path"]} == {"unfinished", "run"}


def test_a_run_without_spans_says_so(tmp_path):
    store = open_store(tmp_path / "store")
    config = settings(tmp_path)
    runs.create_run(store, config, "0" * 64)
    done = command(tmp_path, "last")
    assert done.exit_code != 0 and "has no spans" in str(done.exception)
