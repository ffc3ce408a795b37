"""Our tasks behind a real OpenEnv server.  Needs ``openenv-core``; its dependencies are many, so an environment of its
own runs this (docs/environments.md)."""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cuda_agent.exploits.records import TASKS, solution, task_of
from cuda_agent.exploits.suite import EXPLOITS
from tests.environments.examples import blocks, guides_model, surroundings
from tests.ports import free_port
from tests.waiting import wait_for

pytestmark = pytest.mark.nightly
openenv = pytest.importorskip("openenv")


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """The address of a server of the guide's task, by its command line."""
    (folder / "model.py").write_text(guides_model())
    port = free_port()
    command = [sys.executable, "-m", "cuda_agent.environments.openenv", "model.py", "sandbox.clock=model"]
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(
            [*command, f"--port={port}", *options], cwd=folder, env=surroundings(), stdout=log, stderr=log
        ) as running,
    ):
        try:

            def up() -> bool:
                assert running.poll() is None, (folder / "log").read_text()
                with contextlib.suppress(httpx.HTTPError):
                    return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
                return False

            wait_for("the server", 120, up)
            yield f"ws://127.0.0.1:{port}"
        finally:
            running.terminate()
            running.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), "--steps=6", "--sessions=2") as address:
        yield address


def play(server, actions, **reset):
    async def work():
        async with openenv.GenericEnvClient(base_url=server) as env:
            seen = await env.reset(**reset)
            return [seen, *[await env.step(action) for action in actions]], await env.state()

    return asyncio.run(work())


def test_the_documents_example_prints_what_it_says(server, tmp_path):
    (example,) = [text for kind, text in blocks("## OpenEnv") if kind == "python"]
    code = example.replace("ws://127.0.0.1:8000", server)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    shown = [text for kind, text in blocks("## OpenEnv") if not kind][-1]
    ratios = re.compile(r"[\d.]+x")  # the model clock's baselines are of the installed torch
    assert ratios.sub("?x", said.stdout.strip()) == ratios.sub("?x", shown.strip())


def test_openenvs_own_validator_passes(server):
    command = [sys.executable, "-m", "openenv.cli", "validate", "--url", server.replace("ws:", "http:")]
    said = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"NO_PROXY": "127.0.0.1"})
    report = json.loads(said.stdout)
    assert (said.returncode, report["passed"], report["summary"]["failed_criteria"]) == (0, True, []), said.stdout
    (metadata,) = [each["actual"] for each in report["criteria"] if each["id"] == "metadata_endpoint"]
    assert metadata["name"] == "cuda-agent" and "kernels" in metadata["description"]


@pytest.mark.parametrize("name", ["answer_key_read", "last_rows_left_out", "program_started", "own_memory_file"])
def test_an_exploit_gets_no_reward(name, tmp_path):
    from cuda_agent.config import SandboxConfig
    from cuda_agent.environments.openenv import Arena, KernelAction, KernelServer
    from cuda_agent.sandbox.client import open_sandbox

    exploit, settings = EXPLOITS[name], SandboxConfig(clock="model", run_seconds=2.0, memory_mb=400, threads=2)
    (tmp_path / "secret").write_text("canary canary;\n")
    files = solution(exploit.format, exploit.files, {"@SECRET@": f"/{tmp_path / 'secret'}"}).files

    async def work():
        arena = Arena([task_of(exploit.task, TASKS[exploit.task])], settings, steps=40)
        async with open_sandbox(settings, tmp_path / "cache") as arena.sandbox:
            environment = KernelServer(arena)
            await environment.reset_async()
            for path, text in files.items():
                arguments = {"path": path, "content": text}
                assert (await environment.step_async(KernelAction(tool="Write", arguments=arguments))).text == "ok"
            profile = {"command": "profile"}
            said = (await environment.step_async(KernelAction(tool="Bash", arguments=profile))).text
            return said, await environment.step_async(KernelAction())

    said, last = asyncio.run(work())
    assert "best" not in said and (last.done, last.reward) == (True, -1), (said, last)
    assert last.verdict["status"] in exploit.admissible and last.verdict["status"] != "build_error"


def test_an_episode_ends_with_a_verdict_and_then_takes_no_more(server):
    (begun, ended), state = play(server, [{"tool": ""}], task="model", episode_id="e1")
    assert [m["role"] for m in begun.observation["messages"]] == ["system", "user"] and not begun.done
    assert (ended.reward, ended.done, ended.observation["verdict"]["status"]) == (-1, True, "build_error")
    assert state["task"] == "model" and state["episode_id"] == "e1" and state["done"]
    with pytest.raises(RuntimeError, match="the episode is over"):
        play(server, [{"tool": ""}, {"tool": "Glob", "arguments": {"pattern": "*"}}])


def test_the_last_step_is_judged_although_nobody_said_that_it_is_done(server):
    results, _ = play(server, [{"tool": "Glob", "arguments": {"pattern": "*"}}] * 6)
    assert [result.done for result in results] == [False] * 6 + [True]
    assert results[-1].observation["text"] == "SKILL.md\nmodel.py" and results[-1].reward == -1
    assert results[-1].observation["flags"] == ["loop"]


def test_sessions_do_not_see_each_other(server):
    async def work():
        write = {"tool": "Write", "arguments": {"path": "note", "content": "mine"}}
        look = {"tool": "Bash", "arguments": {"command": "cat note || echo nothing"}}
        async with openenv.GenericEnvClient(base_url=server) as one, openenv.GenericEnvClient(base_url=server) as two:
            await asyncio.gather(one.reset(), two.reset())
            await one.step(write)
            return [(await env.step(look)).observation["text"] for env in (one, two)]

    mine, other = asyncio.run(work())
    assert mine == "mine" and "nothing" in other


def test_a_fault_of_ours_ends_the_episode_without_a_reward():
    from cuda_agent.config import SandboxConfig
    from cuda_agent.environments.openenv import Arena, KernelAction, KernelServer
    from cuda_agent.sandbox.workspace.client import WorkspaceLost
    from tests.agent.agent_cases import TASK

    closed = []

    class Lost:
        @contextlib.asynccontextmanager
        async def workspace(self, files, protected, commands):
            yield self
            closed.append(sorted(files))

        async def call(self, tool, arguments):
            raise WorkspaceLost("the workspace is gone")

    async def work():
        arena = Arena([TASK], SandboxConfig(), steps=5)
        arena.sandbox = Lost()
        environment = KernelServer(arena)
        await environment.reset_async()
        return await environment.step_async(KernelAction(tool="Glob", arguments={"pattern": "*"}))

    last = asyncio.run(work())
    assert (last.done, last.reward) == (True, None) and "a fault of ours" in last.text
    assert closed == [["SKILL.md", "model.py"]]


def test_a_task_that_is_not_there_is_said_so(server):
    with pytest.raises(RuntimeError, match="there is no task nosuch"):
        play(server, [], task="nosuch")
