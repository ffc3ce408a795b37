"""Our tasks as a taskset of ``verifiers``, played by its own harness and command against a scripted server.

Needs ``verifiers`` and ``uv`` beside this interpreter, and a package index for the harness's script: an environment of
its own runs this (docs/environments.md)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_agent.agent.tools import TOOLS
from tests.environments.examples import blocks, guides_model, surroundings
from tests.optimize.chat_server import call, said, serve

pytestmark = pytest.mark.nightly
pytest.importorskip("verifiers.v1")

BIN = Path(sys.prefix) / "bin"


def files_of_the_example() -> dict[str, str]:
    (example,) = [text for kind, text in blocks("## OpenEnv") if kind == "python"]
    names: dict[str, str] = {}
    exec(example.split("def write")[0].replace("from openenv import GenericEnvClient", ""), names)
    return {"kernels/fused.cpp": names["KERNEL"], "plan.json": names["PLAN"]}


def in_shell(folder: Path, command: str) -> str:
    """What a command of the document prints in ``folder``, which has the guide's task and the taskset's module."""
    (folder / "model.py").write_text(guides_model())
    (folder / "my_kernels.py").write_text(next(text for kind, text in blocks("## verifiers") if kind == "python"))
    environment = surroundings(folder) | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", "-euc", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def evaluate(folder: Path, turns) -> tuple[dict, list[dict]]:
    """The trace of one rollout by ``vf-eval``, and what the scripted model was asked."""
    command = next(text for kind, text in blocks("## verifiers") if text.startswith("vf-eval"))
    with serve(said(turns)) as served:
        in_shell(folder, command.replace("http://127.0.0.1:8000/v1", served.url))
    (file,) = folder.rglob("traces.jsonl")
    ((trace,),) = [json.loads(line)["traces"] for line in file.read_text().splitlines()]
    return trace, served.requests


def test_the_librarys_own_validator_passes(tmp_path):
    command = next(text for kind, text in blocks("## verifiers") if text.startswith("vf-validate"))
    in_shell(tmp_path, command)
    (file,) = tmp_path.rglob("results.jsonl")
    (row,) = map(json.loads, file.read_text().splitlines())
    assert (row["valid"], row["gold"]["valid"], row["noop"]["reward"]) == (True, True, -1.0), row


def test_a_rollout_plays_with_our_tools_and_is_rewarded_by_the_verdict(tmp_path):
    writes = [call("Write", path=path, content=text) for path, text in files_of_the_example().items()]
    profile = {"calls": [call("Bash", command="profile")]}
    trace, asked = evaluate(tmp_path, [[{"calls": writes}], [profile], [{"text": "Done."}]])
    assert trace["errors"] == [] and trace["rewards"]["reward"]["score"] == 3.0
    assert trace["metrics"]["correct"] == 1.0 and trace["metrics"]["speedup_eager"] > 1
    tools = {tool["function"]["name"]: tool["function"] for tool in asked[0]["tools"]}
    assert set(tools) == {tool["function"]["name"] for tool in TOOLS}
    assert tools["Write"]["parameters"]["required"] == ["path", "content"]
    assert asked[0]["messages"][0]["role"] == "system" and "plan.json" in asked[0]["messages"][0]["content"]
    assert "profile: " in str(asked[-1]["messages"][-1]["content"])


def test_an_answer_without_a_solution_is_not_correct(tmp_path):
    trace, _ = evaluate(tmp_path, [[{"text": "I would rather not."}]])
    assert trace["errors"] == [] and trace["rewards"]["reward"]["score"] == -1.0
