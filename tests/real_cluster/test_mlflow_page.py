"""What a person sees of a cluster's runs in MLflow, in a real browser: the stages of a run, and two runs compared.

The pictures in docs/ are made here (CUDA_AGENT_PICTURES=docs/pictures).
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from canaries import served
from kubectl import wait_for
from release import Release
from runs import OTHER, submit, succeeded

from cuda_agent.pipeline.graph import STAGES
from cuda_agent.tracking import RUN_TAG, STAGE_TAG
from tests.chromium import PROGRAM, Page, browser

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.browser,
    pytest.mark.nightly,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium"),
]

PICTURES = os.environ.get("CUDA_AGENT_PICTURES")


# What a person has clicked once: the part of MLflow that is about training, and its assistant away.
SETTINGS = """
localStorage.setItem('mlflow.workflowType_v1', '"machine_learning"');
localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');
localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true');
"""
EXPAND = """(() => {
    const link = [...document.querySelectorAll('a')].find(link => link.innerText == '%s');
    let cell = link;
    while (!cell.querySelector('button')) cell = cell.parentElement;
    cell.querySelector('button').click();
})()"""
CLICK = "document.querySelector('%s').click()"
FOLD = "[...document.querySelectorAll('[role=button]')].find(header => header.innerText == '%s').click()"


@dataclass(frozen=True)
class Runs:
    """Two runs in the chart's MLflow, the second with another rate of its actor. ``ids``: (run, stage) -> MLflow's."""

    address: str
    experiment: str
    ids: dict[tuple[str, str], str]


@pytest.fixture(scope="module")
def two(installed: Release) -> Iterator[Runs]:
    for name, overrides in {"first": (), "second": (OTHER,)}.items():
        submit(installed, name, *overrides)
        succeeded(installed.cluster, name)
    from mlflow import MlflowClient

    with served(installed, "mlflow", 5000) as address:
        client = MlflowClient(tracking_uri=address)
        experiment = client.get_experiment_by_name("smoke").experiment_id
        found = client.search_runs([experiment], max_results=1000)
        yield Runs(
            address, experiment, {(run.data.tags[RUN_TAG], run.data.tags[STAGE_TAG]): run.info.run_id for run in found}
        )


@pytest.fixture
def page() -> Iterator[Page]:
    with browser(1500, 1000) as made:
        made.call("Page.addScriptToEvaluateOnNewDocument", source=SETTINGS)
        yield made


def picture(page: Page, name: str, folder: Path) -> None:
    file = Path(PICTURES or folder) / f"{name}.png"
    page.picture(file)
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and 10_000 < file.stat().st_size < 300_000


def test_the_page_shows_the_stages_of_a_run(two: Runs, page: Page, tmp_path: Path) -> None:
    page.open(f"{two.address}/#/experiments/{two.experiment}/runs")
    page.shows("first", "second")
    assert "evaluate-base" not in page.text()
    page.ask(EXPAND % "first")
    page.shows(*(stage.name for stage in STAGES))
    picture(page, "mlflow-stages", tmp_path)


def test_the_page_compares_two_runs(two: Runs, page: Page, tmp_path: Path) -> None:
    chosen = json.dumps([two.ids[run, "agentic"] for run in ("first", "second")])
    page.open(f"{two.address}/#/compare-runs?runs={quote(chosen)}&experiments={quote(json.dumps([two.experiment]))}")
    page.shows("Comparing 2 Runs", "Visualizations", "agentic.actor_lr")
    page.ask(FOLD % "Visualizations")
    page.ask(CLICK % '[aria-label="Parameters - Show diff only"]')
    wait_for("only what differs", 30, lambda: "agentic.critic_lr" not in page.text())
    page.shows(
        "agentic.actor_lr", "0.0003", "0.00015", "entropy", "first", "second"
    )  # of a long list the page has the top
    picture(page, "mlflow-compared", tmp_path)
