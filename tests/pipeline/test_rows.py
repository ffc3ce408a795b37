"""MLflow's rows of runs that are gone or were cut off, in a server and in a database."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cuda_agent import mlflow_api
from cuda_agent.pipeline import rows
from cuda_agent.tracking import PARENT_TAG, RUN_TAG, STAGE_TAG, SWEEP_TAG
from tests.mlflow_server import serving

STORE = "s3://kernels/main"
OURS = ("store", STORE)


@pytest.fixture(scope="module", params=["server", pytest.param("database", marks=pytest.mark.nightly)])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("mlflow")
    if request.param == "database":
        yield mlflow_api.connect(f"sqlite:///{folder}/mlflow.db")
    else:
        with serving(folder) as address:
            yield mlflow_api.connect(address)


def run(api: Any, name: str, store: str = STORE, sweep: str = "", parent: str = "", ended: bool = True) -> list[str]:
    """A run's row and those of two stages, one of which goes on if the run has not ended."""
    experiment = api.experiment("kernels", None)
    more = {SWEEP_TAG: sweep, PARENT_TAG: parent} if sweep else {}
    first = api.create(experiment, {RUN_TAG: name, STAGE_TAG: "", "store": store} | more).run_id
    stages = [
        api.create(experiment, {RUN_TAG: name, STAGE_TAG: stage, PARENT_TAG: first}).run_id for stage in ("rft", "ppo")
    ]
    for row in (*([first] if ended else []), stages[0], *(stages[1:] if ended else [])):
        api.end(row, "FINISHED")
    return [first, *stages]


def found(api: Any, name: str) -> dict[str, str]:
    return {row.run_id: row.status for row in api.find(api.experiments(), RUN_TAG, name)}


def test_rows_of_removed_runs_are_deleted_and_those_of_other_stores_stay(api: Any) -> None:
    gone, kept = run(api, "old"), run(api, "new")
    other = run(api, "old", store="s3://kernels/other")
    assert rows.delete(api, OURS, ["old", "never-recorded"], []) == 3
    assert found(api, "old").keys() == set(other) and found(api, "new").keys() == set(kept)
    assert not set(gone) & found(api, "old").keys()


def test_the_parent_of_a_sweep_goes_with_its_last_run(api: Any) -> None:
    experiment = api.experiment("kernels", None)
    parent = api.create(experiment, {SWEEP_TAG: "s", RUN_TAG: "", STAGE_TAG: ""}).run_id
    for name in ("s-1", "s-2"):
        run(api, name, sweep="s", parent=parent)
    assert rows.delete(api, OURS, ["s-1"], ["s"]) == 3
    assert rows.delete(api, OURS, ["s-2"], ["s"]) == 4
    assert api.find([experiment], SWEEP_TAG, "s") == []


def test_rows_of_runs_that_were_cut_off_end(api: Any) -> None:
    cut, live = run(api, "cut", ended=False), run(api, "live", ended=False)
    other = run(api, "cut", store="s3://kernels/other", ended=False)
    assert rows.end(api, OURS, ["cut", "ended-well"]) == ["cut"]
    states = found(api, "cut")
    assert [states[row] for row in cut] == ["KILLED", "FINISHED", "KILLED"]
    assert [states[row] for row in other] == ["RUNNING", "FINISHED", "RUNNING"]
    assert [found(api, "live")[row] for row in live] == ["RUNNING", "FINISHED", "RUNNING"]
    assert rows.end(api, OURS, ["cut"]) == []


def test_a_server_that_is_away_keeps_nothing_from_being_collected() -> None:
    said = rows.tidy("http://127.0.0.1:9", STORE, ["old"], [], ["cut"])
    assert said["rows"] == 0 and said["ended"] == [] and said["mlflow"]
    assert rows.tidy("off", STORE, ["old"], [], ["cut"]) == {"rows": 0, "ended": []}


@pytest.mark.nightly
def test_a_database_forgets_deleted_rows_and_their_files(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    api = mlflow_api.connect(uri)
    experiment = api.experiment("kernels", (tmp_path / "files").as_uri())
    row = api.create(experiment, {RUN_TAG: "old", STAGE_TAG: "", "store": STORE}).run_id
    (tmp_path / "log.txt").write_text("said")
    api.upload(row, tmp_path / "log.txt")
    assert list((tmp_path / "files").rglob("log.txt"))
    assert rows.tidy(uri, STORE, ["old"], [], []) == {"rows": 1, "ended": []}
    assert not list((tmp_path / "files").rglob("log.txt"))
    command = [sys.executable, "-m", "mlflow", "gc", "--backend-store-uri", uri, "--tracking-uri", uri]
    assert "deleted" not in subprocess.run(command, capture_output=True, text=True, env=os.environ).stdout
