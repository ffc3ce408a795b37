"""Background commands of a workspace, in its real process: they go on, are asked, and end when they must."""

import asyncio
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cuda_agent.sandbox.wire import CommandResult
from cuda_agent.sandbox.workspace.client import Workspaces
from cuda_agent.sandbox.workspace.shell import CommandLimits

FILES = {"model.py": "task\n", "kernels/a.cpp": "int x;\n"}


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


LIMITS = CommandLimits(
    shell_seconds=6.0, output_chars=4000, memory_mb=200, processes=40, disk_mb=32, background_seconds=120.0
)


@pytest.fixture(scope="module")
def parent(loop):
    parent = Workspaces(LIMITS)
    loop.run(parent.__aenter__())
    yield parent
    loop.run(parent.close())


@pytest.fixture
def use(loop, parent):
    """``use(body)`` runs ``await body(call)`` in a new workspace; ``call(tool, **arguments)`` gives a result."""

    async def answer(name, argv, files):
        await asyncio.sleep(0.5)
        return CommandResult(name)

    def use(body, commands=answer):
        async def inside():
            async with parent.open(FILES, frozenset({"model.py"}), commands) as workspace:

                async def call(tool, **arguments):
                    return await workspace.call(tool, arguments)

                return await body(call)

        return loop.run(inside())

    return use


def identity(result):
    return re.search(r"bg\d+", result.text)[0]


async def until(call, name, what, seconds=20):
    """All that it printed until ``what`` came."""
    text = ""
    for _ in range(seconds * 10):
        text += (await call("BashOutput", id=name)).text + "\n"
        if what in text:
            return text
        await asyncio.sleep(0.1)
    raise AssertionError(text)


def test_a_background_command_goes_on_beside_others_and_tells_what_is_new(use):
    async def body(call):
        command = "echo one; cd kernels; export A=1; while [ ! -e ../go ]; do sleep 0.05; done; echo two; exit 3"
        started = await call("Bash", command=command, run_in_background=True)
        name = identity(started)
        first = await until(call, name, "one")
        beside = await call("Bash", command="pwd; echo ${A-unset}; ls")
        await call("Write", path="go", content="")
        second = await until(call, name, "exit code 3")
        again = await call("BashOutput", id=name)
        return started, first, beside, second, again

    started, first, beside, second, again = use(body)
    assert not started.error and "[running]" in first and "two" not in first
    assert "kernels" in beside.text.splitlines() and "unset" in beside.text
    assert "two" in second and "one" not in second
    assert again.text == "[ended with exit code 3]"


def test_it_survives_what_ends_a_foreground_command(use):
    async def body(call):
        name = identity(await call("Bash", command="while :; do echo tick; sleep 0.1; done", run_in_background=True))
        await until(call, name, "tick")
        killed = await call("Bash", command="(sleep 60 &) ; sleep 60", timeout=0.5)
        strays = await call("Bash", command="ps ax 2>/dev/null | grep -c '[s]leep 60' || true")
        await call("BashOutput", id=name)
        later = await until(call, name, "tick")
        ended = await call("KillBash", id=name)
        return killed, strays, later, ended

    killed, strays, later, ended = use(body)
    assert "killed after" in killed.text and "tick" in later and ended.text.endswith("[killed]")
    assert strays.text.splitlines()[-1] == "0"


def test_killing_it_ends_all_that_it_started(use, parent):
    mark = f"7{os.getpid()}.25"

    async def body(call):
        nested = f"setsid bash -c '(setsid sleep {mark} &) ; sleep {mark}' & sleep {mark}"
        name = identity(await call("Bash", command=nested, run_in_background=True))
        for _ in range(100):
            if count(mark) >= 3:
                break
            await asyncio.sleep(0.1)
        before = count(mark)
        await call("KillBash", id=name)
        return before, count(mark)

    assert use(body) == (3, 0)


def test_nothing_is_left_when_the_workspace_closes(use):
    mark = f"8{os.getpid()}.25"

    async def body(call):
        await call("Bash", command=f"(setsid sleep {mark} &); sleep {mark}", run_in_background=True)
        for _ in range(100):
            if count(mark) == 2:
                return True
            await asyncio.sleep(0.1)

    assert use(body)
    for _ in range(100):
        if not count(mark):
            return
        subprocess.run(["sleep", "0.1"])
    raise AssertionError("a background command outlived its workspace")


@pytest.mark.parametrize(
    "command, why",
    [
        ("sleep 100", "killed after 8 s"),
        ("perl -e '$x = \"x\" x (400 << 20); sleep 60'", "memory"),
        ("head -c 64M /dev/zero > big; sleep 60", "on disk"),
    ],
)
def test_its_limits_hold(loop, command, why):
    async def body():
        async with (
            Workspaces(replace(LIMITS, background_seconds=8.0)) as parent,
            parent.open(FILES, frozenset({"model.py"}), None) as workspace,
        ):
            name = identity(await workspace.call("Bash", {"command": command, "run_in_background": True}))
            for _ in range(600):
                said = (await workspace.call("BashOutput", {"id": name})).text
                if "[running]" not in said:
                    return said
                await asyncio.sleep(0.1)

    assert re.search(why, loop.run(body()))


def test_it_is_paused_while_a_time_is_taken_and_a_file_looked_at(use):
    """It counts as fast as it can; while ``profile`` is being answered the count stands still."""
    seen = []

    async def looking(name, argv, files):
        for _ in range(2):
            await asyncio.sleep(0.4)
            seen.append(ticks())
        return CommandResult("looked")

    mark = f"9{os.getpid()}"

    def ticks():
        """Processor time of the counting shell, from outside."""
        total = 0
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if mark in Path(f"/proc/{pid}/cmdline").read_text():
                    total += int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])
            except OSError:
                continue
        return total

    async def body(call):
        name = identity(await call("Bash", command=f": {mark}; while :; do :; done", run_in_background=True))
        await asyncio.sleep(0.5)
        told = await call("Bash", command="profile")
        before = ticks()
        for _ in range(100):
            if ticks() > before:
                break
            await asyncio.sleep(0.1)
        went_on = ticks() > before
        await call("KillBash", id=name)
        return told, went_on

    told, went_on = use(body, looking)
    assert told.text == "looked" and seen[0] == seen[1] > 0 and went_on


def test_what_cannot_be_done_says_so(use):
    async def body(call):
        unknown = await call("BashOutput", id="bg9")
        for _ in range(4):
            await call("Bash", command="sleep 30", run_in_background=True)
        fifth = await call("Bash", command="sleep 30", run_in_background=True)
        stub = identity_or_none(await call("Bash", command="verify", run_in_background="true"))
        return unknown, fifth, stub

    unknown, fifth, stub = use(body)
    assert unknown.error and "no background command 'bg9'" in unknown.text
    assert fifth.error and "at most 4" in fifth.text and stub is None


def identity_or_none(result):
    return None if result.error else identity(result)


def test_it_sees_no_more_than_other_commands(use):
    async def body(call):
        command = "cat /etc/passwd; echo x > /tmp/out-of-the-folder; echo y > ../../escape; verify; echo end"
        name = identity(await call("Bash", command=command, run_in_background=True))
        return await until(call, name, "end")

    said = use(body)
    assert "root:" not in said and said.count("ermission denied") >= 3 and "verify: command not found" in said
    assert not os.path.exists("/tmp/out-of-the-folder")


def test_grep_finds_hidden_files_and_sorts_by_path(use):
    async def body(call):
        await call("Write", path=".hidden/b.cpp", content="long y;\nint z;\n")
        return await call("Grep", pattern="int (x|z)", glob="*.cpp")

    assert use(body).text == ".hidden/b.cpp:2:int z;\nkernels/a.cpp:1:int x;"


def count(mark):
    """Processes that sleep for so long."""
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found += Path(f"/proc/{pid}/cmdline").read_text() == f"sleep\0{mark}\0"
        except OSError:
            continue
    return found
