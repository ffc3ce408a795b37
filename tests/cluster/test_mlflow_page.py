"""What a person sees of a cluster's runs in MLflow, in a real browser: the stages of a run, and two runs compared.

The pictures in docs/ are made here (CUDA_AGENT_PICTURES=docs/pictures).
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from canaries import served
from chromium import PROGRAM, Page, browser
from release import Release
from runs import submit, succeeded

from cuda_agent.pipeline.graph import STAGES
from cuda_agent.tracking import RUN_TAG, STAGE_TAG

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.browser,
    pytest.mark.nightly,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium"),
]

PICTURES = os.environ.get("CUDA_AGENT_PICTURES")


@pytest.fixture(scope="module")
def two_runs(installed: Release) -> Iterator[tuple[str, dict[tuple[str, str], str]]]:
    """The address of the chart's MLflow, and run and stage -> MLflow's name of it; the second run has another critic."""
    for name, overrides in {"first": (), "second": ("critic.lr=5e-4",)}.items():
        submit(installed, name, *overrides)
        succeeded(installed.cluster, name)
    from mlflow import MlflowClient

    with served(installed, "mlflow", 5000) as address:
        client = MlflowClient(tracking_uri=address)
        experiment = client.get_experiment_by_name("smoke").experiment_id
        found = client.search_runs([experiment], max_results=1000)
        names = {(run.data.tags[RUN_TAG], run.data.tags[STAGE_TAG]): run.info.run_id for run in found}
        yield f"{address}/#/experiments/{experiment}", names


@pytest.fixture
def page() -> Iterator[Page]:
    with browser(1500, 1000) as made:
        yield made


def picture(page: Page, name: str, folder: Path) -> None:
    file = (Path(PICTURES) if PICTURES else folder) / f"{name}.png"
    page.picture(file)
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and 10_000 < file.stat().st_size < 300_000
