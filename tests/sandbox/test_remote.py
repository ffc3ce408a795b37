"""The client over real servers: the same answers as in this process, and what it does when servers are full or die."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from cuda_agent.compose import compose
from cuda_agent.config import Config, SandboxConfig
from cuda_agent.errors import ConfigError, SandboxUnready, TaskError
from cuda_agent.sandbox import remote
from cuda_agent.sandbox.client import open_sandbox
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.remote import RemoteSandbox
from cuda_agent.sandbox.wire import CommandResult, Solution, ToolResult, Verdict
from cuda_agent.sandbox.workspace.client import WorkspaceLost
from tests.sandbox.conftest import CHAIN, KERNEL, PLAN, Running, plan_solution, task
from tests.sandbox.service.serving import ONE_JUDGE, QUICK, SLOW, TOKEN, Served

SETTINGS: dict[str, Any] = {"clock": "model", "checks": 2, "run_seconds": 2.0, "memory_mb": 400}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("remote"), "--workspaces", "2", *QUICK) as served:
        yield served.ready()


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_AGENT_SANDBOX_TOKEN", TOKEN)


def use(servers: list[str], work: Callable[[RemoteSandbox], Any], **settings: Any) -> Any:
    """``await work(sandbox)`` with these servers."""

    async def inside() -> Any:
        async with RemoteSandbox(SandboxConfig(servers=servers, **{**SETTINGS, **settings})) as sandbox:
            return await work(sandbox)

    return asyncio.run(inside())


def variants(count: int, start: int = 0) -> list[Solution]:
    return [plan_solution(plan=PLAN | {"guards": [f"{number} == {number}"]}) for number in range(start, start + count)]


# ----------------------------------------------------------------------------------------------- the same as in process


def test_verdicts_probes_and_specs_are_those_of_this_process(served, start):
    here: Running = start(**SETTINGS)
    solutions = [
        plan_solution(),
        plan_solution(KERNEL.replace("0.0f)", "0.0f) + 0.5f")),
        plan_solution(KERNEL.replace("y[i] =", "z[i] =")),
        Solution("plan", {}),
        Solution("python", {"model_new.py": CHAIN.replace("class Model", "class ModelNew")}),
    ]

    async def there(sandbox):
        verdicts = [await sandbox.evaluate(task(), solution) for solution in solutions]
        return verdicts, await sandbox.spec(task()), await sandbox.probe(task(), compile=False)

    verdicts, spec, probe = use([served.address], there)
    for verdict, solution in zip(verdicts, solutions, strict=True):
        mine = here.evaluate(task(), solution)
        if any("not observed" in line for line in (*verdict.advice, *mine.advice)):  # in time, on a busy machine
            verdict, mine = (replace(one, ran=[], advice=[]) for one in (verdict, mine))
        assert verdict.to_json() == mine.to_json()
    assert [verdict.status for verdict in verdicts] == ["ok", "wrong", "build_error", "build_error", "ok"]
    assert spec == here.wait(here.sandbox.spec(task()))
    mine = here.probe(task())
    assert (probe.inputs, probe.deterministic, probe.error) == (mine.inputs, True, "")


def test_a_broken_task_is_a_task_error(served):
    async def work(sandbox):
        with pytest.raises(TaskError, match="the task defines no Model"):
            await sandbox.evaluate(task("import torch"), plan_solution())
        with pytest.raises(TaskError, match="the task defines no Model"):
            await sandbox.spec(task("import torch"))
        with pytest.raises(TaskError, match="more than"):
            await sandbox.evaluate(task(CHAIN + "#" * (1 << 20)), plan_solution())
        with pytest.raises(TaskError):
            await sandbox.evaluate(task(CHAIN + "#" * (9 << 20)), plan_solution())
        assert "more than" in (await sandbox.probe(task(CHAIN + "#" * (1 << 20)))).error

    use([served.address], work)


@pytest.mark.parametrize("files", [{"../plan.json": "{}"}, {"plan.json": "\ud800"}, {"plan.json": "x" * (9 << 20)}])
def test_a_solution_that_cannot_be_sent_is_the_candidates_build_error(served, files):
    verdict = use([served.address], lambda sandbox: sandbox.evaluate(task(), Solution("plan", files)))
    assert verdict.status == "build_error" and verdict.message and verdict.reward == -1


def test_a_workspace_works_as_in_this_process(served):
    asked = []

    async def commands(name, argv, files):
        asked.append((name, argv, sorted(files)))
        return CommandResult("verify: wrong", error=True, files={"plan.json": "{}", "kernels/b.cpp": None})

    async def work(sandbox):
        files = {"model.py": "task\n", "SKILL.md": "rules\n"}
        async with sandbox.workspace(files, frozenset(files), commands) as workspace:
            written = await workspace.call("Write", {"path": "kernels/a.cpp", "content": "int x;\n"})
            changes = "echo easy > model.py; echo > kernels/b.cpp"
            told = await workspace.call("Bash", {"command": f"{changes}; verify -v || echo failed"})
            strange = await workspace.call("Bash", {"command": {"deep": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}})
            unplain = await workspace.call("Bash", {"command": object()})
            return written, told, strange, unplain, await workspace.files()

    written, told, strange, unplain, files = use([served.address], work)
    assert written == ToolResult("ok")
    assert told.text.splitlines() == ["verify: wrong", "failed"]
    assert strange.error and unplain.error
    assert files == {"model.py": "task\n", "SKILL.md": "rules\n", "kernels/a.cpp": "int x;\n", "plan.json": "{}"}
    assert asked[0][:2] == ("verify", ["-v"]) and "kernels/b.cpp" in asked[0][2]


@pytest.mark.parametrize("error", [ValueError, KeyError, TaskError])
def test_an_exception_of_the_commands_comes_through_and_the_workspace_is_given_up(served, error):
    async def commands(name, argv, files):
        raise error("of the stage")

    async def work(sandbox):
        async with sandbox.workspace({}, frozenset(), commands) as workspace:
            with pytest.raises(error, match="of the stage"):
                await workspace.call("Bash", {"command": "compile"})
            with pytest.raises(WorkspaceLost):
                await workspace.files()

    use([served.address], work)


def test_a_full_house_of_workspaces_is_waited_for(served):
    async def work(sandbox):
        async def one(number):
            async with sandbox.workspace({}, frozenset(), _never) as workspace:
                return (await workspace.call("Bash", {"command": f"echo {number}"})).text

        return await asyncio.gather(*(one(number) for number in range(5)))

    assert use([served.address], work) == [str(number) for number in range(5)]


async def _never(name, argv, files):
    raise AssertionError


def test_giving_up_takes_the_work_back(served):
    async def work(sandbox):
        evaluations = [
            asyncio.create_task(sandbox.evaluate(task(), plan_solution(SLOW + f"// {number}"))) for number in range(4)
        ]
        await asyncio.sleep(0.5)
        for evaluation in evaluations:
            evaluation.cancel()
        await asyncio.gather(*evaluations, return_exceptions=True)

    use([served.address], work)
    for _ in range(100):
        if served.http.get("/v1/about").json()["queued"] == 0:
            return
        time.sleep(0.05)
    raise AssertionError("what nobody waits for is still queued")


# ------------------------------------------------------------------------------------------------------- configuration


def test_the_configuration_decides_where_the_sandbox_is(tmp_path):
    assert isinstance(open_sandbox(SandboxConfig(), tmp_path), LocalSandbox)
    assert isinstance(open_sandbox(SandboxConfig(servers=["http://a:1"]), tmp_path), RemoteSandbox)
    assert compose(["sandbox.servers=['http://a:1','https://b/x']"]).sandbox.servers == ["http://a:1", "https://b/x"]


@pytest.mark.parametrize("servers", ["[a:1]", "['http://']", "['http://u:p@host']", "['http://a','http://a']"])
def test_what_is_no_list_of_addresses_is_refused(servers):
    with pytest.raises(ConfigError, match=r"sandbox\.servers"):
        compose([f"sandbox.servers={servers}"])


def test_where_a_solution_is_judged_does_not_change_what_its_verdict_is_kept_as(tmp_path):
    here = LocalSandbox(SandboxConfig(), tmp_path)
    there = LocalSandbox(SandboxConfig(servers=["http://a"], token_env="X", token_file="y"), tmp_path)
    other = LocalSandbox(SandboxConfig(checks=3), tmp_path)
    names = [sandbox._verdict_file(task(), plan_solution(), "quick") for sandbox in (here, there, other)]
    assert names[0] == names[1] != names[2]


def test_a_wrong_token_other_settings_and_a_missing_role_are_told_at_once(served, tmp_path, monkeypatch):
    def evaluate(sandbox):
        return sandbox.evaluate(task(), plan_solution())

    with pytest.raises(SandboxUnready, match=r"sandbox\.clock is model on this server, real was asked for"):
        use([served.address], evaluate, clock="real")
    monkeypatch.setenv("CUDA_AGENT_SANDBOX_TOKEN", "another-token-than-the-servers")
    with pytest.raises(SandboxUnready, match="environment variable CUDA_AGENT_SANDBOX_TOKEN"):
        use([served.address], evaluate)
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert use([served.address], evaluate, token_file=str(tmp_path / "token")).status == "ok"
    monkeypatch.setattr(remote, "UNREACHABLE_SECONDS", 0.5)
    monkeypatch.setenv("CUDA_AGENT_SANDBOX_TOKEN", TOKEN)
    with Served(tmp_path, "--roles", "workspace", *QUICK) as other, pytest.raises(SandboxUnready, match="no role eval"):
        use([other.ready().address], evaluate)


def test_what_no_server_can_do_is_told_as_in_this_process(tmp_path, monkeypatch):
    """Here a judge whose walls do not hold after the server was ready."""
    failed = {
        "id": "x",
        "state": "failed",
        "result": None,
        "error": {"kind": "unready", "message": "a wall is missing"},
    }
    with Broken(lambda method, path: (202, {}, failed)) as one, Broken(lambda method, path: (202, {}, failed)) as two:
        with pytest.raises(SandboxUnready, match="a wall is missing"):
            use([one.address, two.address], lambda sandbox: sandbox.evaluate(task(), plan_solution()))
        assert len(one.seen) == len(two.seen) == 1


def test_a_server_that_does_not_know_a_setting_is_no_fault_of_the_candidate():
    unknown = {"error": {"kind": "malformed", "message": "'threads' is none of clock", "where": "settings"}}
    with Broken(lambda method, path: (422, {}, unknown)) as broken, pytest.raises(SandboxUnready, match="settings"):
        use([broken.address], lambda sandbox: sandbox.evaluate(task(), plan_solution()))


def test_a_server_that_still_starts_is_waited_for_and_lacks_no_wall(monkeypatch):
    monkeypatch.setattr(remote, "UNREACHABLE_SECONDS", 0.2)
    monkeypatch.setattr(remote, "FULL_SECONDS", 2.0)
    starting = {"error": {"kind": "starting", "message": "starting: the walls are not proven yet"}}
    with Broken(lambda method, path: (503, {"Retry-After": "0.1"}, starting)) as one:
        verdict = use([one.address], lambda sandbox: sandbox.evaluate(task(), plan_solution()))
        assert (verdict.status, verdict.reward) == ("infra", None) and "starting" in verdict.message
        assert len(one.seen) > 3


def test_nobody_there_is_infra_in_the_end(monkeypatch):
    monkeypatch.setattr(remote, "UNREACHABLE_SECONDS", 1.0)
    verdict = use(["http://127.0.0.1:9"], lambda sandbox: sandbox.evaluate(task(), plan_solution()))
    assert (verdict.status, verdict.reward) == ("infra", None)
    assert "http://127.0.0.1:9: does not answer (ConnectError)" in verdict.message
    with pytest.raises(WorkspaceLost, match="does not answer"):
        use(["http://127.0.0.1:9"], _open_one)


async def _open_one(sandbox):
    async with sandbox.workspace({}, frozenset(), _never):
        pass


# ------------------------------------------------------------------------------------------------------- broken servers


class Broken:
    """A server that answers by a script, for faults that a sound one does not have: ``answers(method, path)`` gives
    status, headers and JSON."""

    def __init__(self, answers: Callable[[str, str], tuple[int, dict[str, str], Any]]) -> None:
        self.seen: list[tuple[float, str, str]] = []
        self._answers = answers
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        listening.listen(100)  # now, not when the thread gets there: a client would be refused
        self.address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(self._app, interface="asgi3", log_level="critical", lifespan="off")
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        self.seen.append((time.monotonic(), scope["method"], scope["path"]))
        status, headers, answer = self._answers(scope["method"], scope["path"])
        sent = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def __enter__(self) -> "Broken":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)


INFRA = {"id": "x", "state": "done", "result": Verdict("infra", "plan", "quick", "cpu", "model", "gone").to_json()}
INFRA |= {"error": None}


def test_infra_is_tried_on_another_server_and_never_on_the_same_twice(served):
    with Broken(lambda method, path: (202, {}, INFRA)) as broken:

        async def work(sandbox):
            verdicts = []
            while not broken.seen:  # a task prefers one of the two servers, by its digest and their addresses
                number = len(verdicts)
                verdicts.append(await sandbox.evaluate(task(CHAIN + f"# {number}"), plan_solution()))
            return verdicts

        verdicts = use([broken.address, served.address], work)
        assert all(verdict.status == "ok" for verdict in verdicts)
        assert len(broken.seen) == 1
        seen = len(broken.seen)
        verdict = use([broken.address], lambda sandbox: sandbox.evaluate(task(), plan_solution()))
        assert (verdict.status, verdict.message) == ("infra", "gone") and len(broken.seen) == seen + 1


def test_what_is_lost_again_and_again_is_infra_after_a_bounded_number_of_attempts():
    queued = {"id": "x", "state": "queued", "result": None, "error": None}

    def forgets(method, path):
        return (202, {}, queued) if method == "POST" else (404, {}, {"error": {"kind": "unknown", "message": "what?"}})

    with Broken(forgets) as broken:
        verdict = use([broken.address], lambda sandbox: sandbox.evaluate(task(), plan_solution()))
        assert verdict.status == "infra" and "lost with its server" in verdict.message
        assert [method for _, method, _ in broken.seen].count("POST") == remote.ATTEMPTS


def test_retry_after_is_honoured_and_stretched_at_random(served):
    full = (429, {"Retry-After": "1"}, {"error": {"kind": "full", "message": "full"}})
    times: dict[int, int] = {}

    def answers(method, path):
        times[0] = times.get(0, 0) + 1
        return full if times[0] <= 2 else (202, {}, INFRA | {"result": INFRA["result"] | {"status": "ok"}})

    waits = []
    for _ in range(3):
        times.clear()
        with Broken(answers) as broken:
            verdict = use([broken.address], lambda sandbox: sandbox.evaluate(task(), plan_solution()))
            assert verdict.status == "ok"
            waits += [later[0] - sooner[0] for sooner, later in zip(broken.seen, broken.seen[1:], strict=False)]
    assert len(waits) == 6 and min(waits) >= 0.99
    assert len({round(wait, 3) for wait in waits}) > 1


def test_servers_of_different_roles_do_not_keep_each_other_from_working(monkeypatch):
    """A pool a role, as on a cluster: whoever has no workspaces goes on judging, and the other way round."""
    monkeypatch.setattr(remote, "UNREACHABLE_SECONDS", 3600.0)  # how long a role that is not there is not asked for
    verdict = INFRA | {"result": INFRA["result"] | {"status": "ok"}}
    no_role = (404, {}, {"error": {"kind": "role", "message": "this server has no such role"}})

    def judges(method, path):
        return (202, {}, verdict) if path == "/v1/jobs" else no_role

    def keeps_folders(method, path):
        return no_role if path == "/v1/jobs" else (201, {}, {"id": "x", "owner": "y"})

    with Broken(judges) as judge, Broken(keeps_folders) as keeper, Broken(lambda method, path: no_role) as builder:

        async def work(sandbox):
            async with asyncio.timeout(60):  # else an hour
                for number in range(8):
                    async with sandbox.workspace({}, frozenset(), _never):
                        assert (await sandbox.evaluate(task(CHAIN + f"# {number}"), plan_solution())).status == "ok"

        use([judge.address, keeper.address, builder.address], work)
        for server, wrong in ((judge, "/v1/workspaces"), (keeper, "/v1/jobs")):
            assert [path for _, _, path in server.seen].count(wrong) <= 1


def test_a_full_server_is_passed_over(served):
    full = (429, {"Retry-After": "30"}, {"error": {"kind": "full", "message": "full"}})
    with Broken(lambda method, path: full) as broken:

        async def work(sandbox):
            return [
                (await sandbox.evaluate(task(CHAIN + f"# {number}"), plan_solution())).status
                for number in range(20)  # each prefers either server by a hash
            ]

        begin = time.monotonic()
        assert use([broken.address, served.address], work) == ["ok"] * 20
        assert time.monotonic() - begin < 25 and len(broken.seen) == 1


@pytest.mark.parametrize(
    "answer", [(200, {}, ["no", "object"]), (500, {}, "oops"), (502, {}, {}), (301, {"Location": "/"}, {})]
)
def test_nonsense_is_a_server_that_is_away(served, answer):
    with Broken(lambda method, path: answer) as broken:

        async def work(sandbox):
            return [
                (await sandbox.evaluate(task(CHAIN + f"# {number}"), plan_solution())).status for number in range(6)
            ]

        assert use([broken.address, served.address], work) == ["ok"] * 6


# ------------------------------------------------------------------------------------------------------ several servers


@pytest.fixture
def three(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Served]]:
    servers = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        servers.append(Served(folder, "--roles", getattr(request, "param", "evaluate"), *QUICK, wrapper=ONE_JUDGE))
    for server in servers:
        server.ready()
    yield servers
    for server in servers:
        server.__exit__(None, None, None)


@pytest.mark.nightly
def test_tasks_stay_with_a_server_and_one_that_is_killed_takes_nothing_with_it(three):
    """Twelve tasks with eight solutions each; in the middle the server that holds most of them is killed."""
    codes = [CHAIN + f"# {number}\n" for number in range(12)]
    work = [(task(code), solution) for code in codes for solution in variants(8)]
    addresses = [server.address for server in three]
    results: list[tuple[int, Verdict]] = []

    async def evaluate(sandbox):
        first = await asyncio.gather(*(sandbox.evaluate(task(code), plan_solution()) for code in codes))
        assert {verdict.status for verdict in first} == {"ok"}
        jobs = [_count(server, "submitted_total") for server in three]
        assert sum(jobs) == 12, "each task went to one server"
        victim = jobs.index(max(jobs))

        async def one(index, work):
            results.append((index, await sandbox.evaluate(*work)))
            if len(results) == len(work_) // 6:
                three[victim].stop(signal.SIGKILL)

        work_ = work
        await asyncio.gather(*(one(index, item) for index, item in enumerate(work)))
        return victim

    victim = use(addresses, evaluate)
    assert sorted(index for index, _ in results) == list(range(len(work))), "nothing is lost, nothing is there twice"
    assert {verdict.status for _, verdict in results} == {"ok"}
    assert all(verdict.checks == 2 for _, verdict in results)
    assert three[victim].process.poll() == -signal.SIGKILL
    alive = [server for number, server in enumerate(three) if number != victim]
    assert sum(_count(server, "verdicts_total") for server in alive) >= len(work) * 2 / 3 - 12


@pytest.mark.parametrize("three", ["workspace"], indirect=True)
def test_a_workspace_dies_with_its_server_and_the_next_one_opens_elsewhere(three):
    async def work(sandbox):
        async with sandbox.workspace({}, frozenset(), _never) as workspace:
            used = next(server for server in sandbox.rooms if server.workspaces)
            dead = next(server for server in three if server.address == used.address)
            dead.stop(signal.SIGKILL)
            with pytest.raises(WorkspaceLost):
                await workspace.call("Bash", {"command": "echo"})
        texts = []
        for _ in range(3):
            async with sandbox.workspace({}, frozenset(), _never) as workspace:
                texts.append((await workspace.call("Bash", {"command": "echo alive"})).text)
        return texts

    assert use([server.address for server in three], work) == ["alive"] * 3


def _count(server: Served, name: str) -> int:
    lines = server.http.get("/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(f"cuda_agent_sandbox_{name}")))


@pytest.mark.nightly
def test_the_command_line_evaluates_on_servers(served, tmp_path):
    import subprocess
    import sys

    (tmp_path / "model.py").write_text(CHAIN)
    for name, text in plan_solution().files.items():
        path = tmp_path / "solution" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    overrides = [f"sandbox.{name}={value}" for name, value in SETTINGS.items()]
    places = {"PYTHONPATH": str(Path(__file__).parents[2]), "XDG_CACHE_HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "cuda_agent.cli", "evaluate", "model.py", "solution", "--json",
         f"sandbox.servers=['{served.address}']", *overrides],
        capture_output=True, text=True, cwd=tmp_path, env=os.environ | places,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["status"] == "ok"
    assert not any((tmp_path / name).exists() for name in (".cuda-agent", "cuda-agent")), "nothing was judged here"
    assert Config().sandbox.servers == []
