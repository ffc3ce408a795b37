"""Reports on a cluster: what ``finish`` leaves in a real MLflow server, and what is fetched from there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cuda_agent.config import Config, ConfigError, freeze
from cuda_agent.pipeline import cluster_report, pod
from cuda_agent.tracking import Mirror
from tests.mlflow_server import serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("mlflow")) as address:
        yield address


def left(server: str, run: str, folder: Path) -> None:
    """A run's report, left in MLflow by a mirror as ``finish`` leaves it."""
    config = Config()
    here = pod.Surroundings(str(folder / "store"), server, folder / "c", folder / "p", folder)
    (folder / "report" / "assets").mkdir(parents=True)
    (folder / "report" / "index.html").write_text(f"<p>{run}</p>")
    (folder / "report" / "report.json").write_text("{}")
    (folder / "report" / "assets" / "a.svg").write_text("<svg/>")
    with pod.mirrored(here, config, freeze(config)[1], run) as mirror:
        assert isinstance(mirror, Mirror)
        mirror.update(None, status="FINISHED", artifacts=[folder / "report"])
        assert mirror.close(60)


def test_a_report_is_fetched_whole(server, tmp_path):
    left(server, "one", tmp_path / "one")
    left(server, "two", tmp_path / "two")
    folder = cluster_report.download(server, "two", tmp_path / "fetched")
    assert (folder / "index.html").read_text() == "<p>two</p>"
    assert (folder / "assets" / "a.svg").read_text() == "<svg/>" and (folder / "config.json").exists()


def test_a_run_without_a_report_and_a_run_that_nobody_knows_are_said_so(server, tmp_path):
    config = Config()
    here = pod.Surroundings(str(tmp_path / "store"), server, tmp_path / "c", tmp_path / "p", tmp_path)
    with pod.mirrored(here, config, freeze(config)[1], "begun") as mirror:
        mirror.update(None, status="RUNNING")
    with pytest.raises(ConfigError, match="Run begun has no report yet"):
        cluster_report.download(server, "begun", tmp_path / "a")
    with pytest.raises(ConfigError, match="MLflow knows no run nobody"):
        cluster_report.download(server, "nobody", tmp_path / "a")
    assert not (tmp_path / "a").exists()
