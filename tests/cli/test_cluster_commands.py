"""The commands of the cluster: what they say before anything runs."""

import contextlib
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from cuda_agent.cli import cluster as cli_cluster
from cuda_agent.cli import main
from cuda_agent.cli import runs as cli_runs
from cuda_agent.cluster.api import ClusterError
from cuda_agent.errors import ConfigError

COMMANDS = ["submit", "sweep", "watch", "logs", "runs", "report", "diff"]
COMMANDS += ["episodes", "cancel", "resume", "mlflow", "render", "doctor", "gc"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(command):
    result = CliRunner().invoke(main.app, [command, "--help"], catch_exceptions=False)
    assert result.exit_code == 0 and f"cuda-agent {command}" in result.output.split("Example")[1]


def test_help_loads_no_client_and_no_renderer():
    script = (
        "import sys; sys.argv = ['cuda-agent', 'submit', '--help']\n"
        "from cuda_agent.cli import main as cli\n"
        "try: cli.app()\n"
        "except SystemExit: pass\n"
        "print({'kubernetes', 'hera', 'hydra', 'torch', 'httpx'} & set(sys.modules), file=sys.stderr)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stderr.strip() == "set()"


def test_submitting_loads_neither_the_renderer_nor_what_trains():
    """A person waits for it."""
    script = (
        "import sys; sys.argv = ['cuda-agent', 'submit', 'experiment=smoke', '--dry-run', '--json']\n"
        "from cuda_agent.cli import main as cli\n"
        "try: cli.app()\n"
        "except SystemExit: pass\n"
        "print({'hera', 'torch', 'transformers', 'mlflow'} & set(sys.modules), file=sys.stderr)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stderr.strip() == "set()" and '"Workflow"' in ended.stdout


def test_what_the_pods_run_is_not_shown_to_people():
    help_text = CliRunner().invoke(main.app, ["--help"]).output
    assert "\n  pod " not in help_text and "\n  submit " in help_text


def test_following_all_pods_at_once_is_refused():
    script = [sys.executable, "-m", "cuda_agent.cli", "logs", "last", "-f"]
    ended = subprocess.run(script, capture_output=True, text=True)
    assert ended.returncode == 78 and "name one stage" in ended.stderr


class Logging:
    """A cluster whose pods say their names."""

    def logs(self, pod: str, follow: bool = False) -> list[str]:
        return [f"pod {pod}"]


def logs_of(monkeypatch: pytest.MonkeyPatch, pods: dict[str, str], mlflow: Any) -> list[tuple[str, str]]:
    monkeypatch.setattr("cuda_agent.cluster.submit.pods_of", lambda place, run: pods)
    monkeypatch.setattr("cuda_agent.cluster.results.mlflow", mlflow)
    monkeypatch.setattr("cuda_agent.cluster.results.logged", lambda address, run: ["synthesis", "critic"])
    monkeypatch.setattr("cuda_agent.cluster.results.log", lambda address, run, stage: [f"mlflow {stage}"])
    return list(cli_runs._cluster_logs(Logging(), "r", "", False))  # type: ignore[arg-type]


def test_the_logs_of_a_run_are_those_of_its_pods_and_of_the_stages_whose_pods_are_gone(monkeypatch):
    found = logs_of(monkeypatch, {"critic": "c"}, lambda place: contextlib.nullcontext(""))
    assert sorted(found) == [("critic", "pod c"), ("synthesis", "mlflow synthesis")]


def test_a_pod_that_still_pulls_its_image_does_not_hide_other_logs(monkeypatch):
    def logs(self, pod: str, follow: bool = False):
        raise ClusterError("container main is waiting to start", 400)

    monkeypatch.setattr(Logging, "logs", logs)
    found = logs_of(monkeypatch, {"critic": "c"}, lambda place: contextlib.nullcontext(""))
    assert found == [("synthesis", "mlflow synthesis")]


def test_without_mlflow_the_logs_of_a_run_are_those_of_its_pods(monkeypatch):
    def off(place):
        raise ConfigError("no MLflow")

    assert logs_of(monkeypatch, {"critic": "c"}, off) == [("critic", "pod c")]
    with pytest.raises(ConfigError, match="no MLflow"):
        logs_of(monkeypatch, {}, off)


def test_a_pods_command_outside_of_a_pod_says_so(monkeypatch):
    monkeypatch.delenv("CUDA_AGENT_STORE", raising=False)
    script = [sys.executable, "-m", "cuda_agent.cli", "pod", "stage", "rft", "--config", "ab", "--workflow", "w"]
    ended = subprocess.run(script, capture_output=True, text=True)
    assert ended.returncode == 78 and "CUDA_AGENT_STORE" in ended.stderr and "Traceback" not in ended.stderr


class Faulty:
    """A cluster with one Workflow, which is away as often as told, and then says that the Workflow has ended."""

    name, namespace = "here", "there"

    def __init__(self, status: int, times: int) -> None:
        self.status, self.times = status, times

    def all(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        labels = {"cuda-agent/run": "r"}
        return [{"metadata": {"name": "r", "labels": labels}, "spec": {}, "status": {"phase": "Running"}}]

    def get(self, kind: str, name: str) -> dict[str, Any]:
        if self.times:
            self.times -= 1
            raise ClusterError("away", self.status)
        (workflow,) = self.all(kind)
        return workflow | {"status": {"phase": "Succeeded"}}


def test_watching_outlives_an_api_server_that_is_away_for_a_while(monkeypatch, capsys):
    monkeypatch.setattr(cli_cluster, "EVERY", 0.0)
    monkeypatch.setattr("cuda_agent.cluster.submit.find", lambda place, run: place.all("Workflow")[0])
    monkeypatch.setattr("cuda_agent.cluster.submit.run_of", lambda workflow: "r")
    monkeypatch.setattr("cuda_agent.cluster.submit.views", lambda workflow: [])
    monkeypatch.setattr("cuda_agent.cluster.submit.delays", lambda place, workflow, shown: {})
    for status in (0, 503):
        assert cli_cluster._follow(Faulty(status, 3), "r", False) == 0  # type: ignore[arg-type]
    with pytest.raises(ClusterError):
        cli_cluster._follow(Faulty(403, 1), "r", False)  # type: ignore[arg-type]
    monkeypatch.setattr(cli_cluster, "AWAY", 0.0)
    with pytest.raises(ClusterError):
        cli_cluster._follow(Faulty(0, 10**9), "r", False)  # type: ignore[arg-type]
