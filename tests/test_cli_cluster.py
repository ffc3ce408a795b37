"""The commands of the cluster: what they say before anything runs."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cuda_agent import cli

COMMANDS = ["submit", "sweep", "watch", "logs", "runs", "report", "diff"]
COMMANDS += ["episodes", "cancel", "resume", "mlflow", "render", "doctor", "gc"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(command):
    result = CliRunner().invoke(cli.app, [command, "--help"], catch_exceptions=False)
    assert result.exit_code == 0 and f"cuda-agent {command}" in result.output.split("Example")[1]


def test_help_loads_no_client_and_no_renderer():
    script = (
        "import sys; sys.argv = ['cuda-agent', 'submit', '--help']\n"
        "from cuda_agent import cli\n"
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
        "from cuda_agent import cli\n"
        "try: cli.app()\n"
        "except SystemExit: pass\n"
        "print({'hera', 'torch', 'transformers', 'mlflow'} & set(sys.modules), file=sys.stderr)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stderr.strip() == "set()" and '"Workflow"' in ended.stdout


def test_what_the_pods_run_is_not_shown_to_people():
    help_text = CliRunner().invoke(cli.app, ["--help"]).output
    assert "\n  pod " not in help_text and "\n  submit " in help_text


def test_following_all_pods_at_once_is_refused():
    script = [sys.executable, "-m", "cuda_agent.cli", "logs", "last", "-f"]
    ended = subprocess.run(script, capture_output=True, text=True)
    assert ended.returncode == 78 and "name one stage" in ended.stderr


def test_a_pods_command_outside_of_a_pod_says_so(monkeypatch):
    monkeypatch.delenv("CUDA_AGENT_STORE", raising=False)
    script = [sys.executable, "-m", "cuda_agent.cli", "pod", "stage", "rft", "--config", "ab", "--workflow", "w"]
    ended = subprocess.run(script, capture_output=True, text=True)
    assert ended.returncode == 78 and "CUDA_AGENT_STORE" in ended.stderr and "Traceback" not in ended.stderr
