"""The commands of the sandbox: what they say before anything runs."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cuda_agent.cli import main
from cuda_agent.compose import compose
from cuda_agent.pipeline.graph import STAGES
from cuda_agent.pipeline.manifest import identify


def ask(*arguments: str) -> str:
    result = CliRunner().invoke(main.app, ["sandbox", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_help_of_the_group_loads_nothing_heavy_and_names_every_command():
    script = (
        "import sys; sys.argv = ['cuda-agent', 'sandbox', '--help']\n"
        "from cuda_agent.cli import main as cli\n"
        "try: cli.app()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'httpx', 'hydra', 'numpy', 'cuda_agent.config'}\n"
        "print(heavy & set(sys.modules), file=sys.stderr)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stderr.strip() == "set()"
    for command in ("serve", "bench", "schema"):
        assert f"\n  {command} " in ended.stdout


@pytest.mark.parametrize("command", ["serve", "bench", "schema"])
def test_every_command_has_an_example(command):
    assert "cuda-agent sandbox " + command in ask(command, "--help").split("Example")[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--roles", "judge"], "expected any of workspace, build, evaluate, got 'judge'"),
        (["serve", "--roles", ""], "expected any of workspace"),
        (["serve", "sandbox.server=3"], "sandbox.servers"),
        (["serve", "sandbox.token_file=/nonexistent"], "sandbox.token_file: /nonexistent: No such file"),
        (["serve", "--host", "256.0.0.1", "sandbox.token_env=LONG_ENOUGH"], "cannot listen on 256.0.0.1"),
        (["bench", "--formats", "fast"], "expected any of plan, extension, python, got 'fast'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_78(arguments, said, tmp_path):
    own = {"PATH": "/usr/bin:/bin", "LONG_ENOUGH": "x" * 20, "XDG_CACHE_HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "cuda_agent.cli", "sandbox", *arguments],
        capture_output=True, text=True, cwd=tmp_path, timeout=60,
        env=own | {"PYTHONPATH": str(main.Path(main.__file__).parents[2])},
    )  # fmt: skip
    assert ended.returncode == 78, ended.stderr
    assert said in ended.stderr and "Traceback" not in ended.stderr


def test_where_solutions_are_judged_is_no_part_of_a_stages_key_but_that_it_is_elsewhere_is():
    here, there, elsewhere = (
        compose([f"sandbox.servers={servers}"]) for servers in ("[]", "['http://a']", "['http://b']")
    )
    for stage in STAGES:
        keys = [identify(stage, config, {}).key for config in (here, there, elsewhere)]
        assert keys[1] == keys[2]
        assert (keys[0] != keys[1]) == stage.timing


def test_optimize_refuses_a_format_that_takes_no_time_on_the_device(tmp_path):
    arguments = ["optimize", "model.py", "--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--format", "triton"]
    result = CliRunner().invoke(main.app, [*arguments, "--device", "cpu", "--output", str(tmp_path / "out")])
    assert "--format triton --device cpu" in str(result.exception) and "speed needs a GPU" in str(result.exception)
    assert not (tmp_path / "out").exists()
