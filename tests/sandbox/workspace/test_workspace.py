"""Workspaces as processes: the shell, its walls, and what a client is told when one dies."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from cuda_agent.sandbox.wire import CommandResult, ToolResult
from cuda_agent.sandbox.workspace.client import ARGUMENT_BYTES, WorkspaceLost, Workspaces
from cuda_agent.sandbox.workspace.shell import CommandLimits, cut
from cuda_agent.sandbox.workspace.worker import checked

FILES = {"model.py": "task\n", "SKILL.md": "rules\n", "kernels/a.cpp": "int x;\n"}
PROTECTED = frozenset({"model.py", "SKILL.md"})


async def echo(name, argv, files):
    """What a stage would answer: here, what it was asked."""
    return CommandResult(f"{name} {argv} {sorted(files)}", error=name == "verify")


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def parent(loop):
    parent = Workspaces(CommandLimits(shell_seconds=4.0, output_chars=4000, memory_mb=256, processes=32, disk_mb=32))
    loop.run(parent.__aenter__())
    yield parent
    loop.run(parent.close())


@pytest.fixture
def use(loop, parent):
    """``use(body)`` runs ``await body(workspace)`` in a new workspace."""

    def use(body, commands=echo):
        async def inside():
            async with parent.open(FILES, PROTECTED, commands) as workspace:
                return await body(workspace)

        return loop.run(inside())

    return use


@pytest.fixture
def bash(use):
    """``bash(*commands)`` gives the results of shell commands, one after the other in one workspace."""

    def bash(*commands, **named):
        async def body(workspace):
            return [await workspace.call("Bash", {"command": command}) for command in commands]

        results = use(body, **named)
        return results[0] if len(results) == 1 else results

    return bash


def folders(parent):
    return [name for name in os.listdir(parent._folder)]


# ---------------------------------------------------------------------------------------------------------- the shell


def test_folder_and_exported_variables_last_and_nothing_else(bash):
    results = bash(
        "cd kernels; export A='two\nlines \"quoted\"'; B=plain; f() { echo f; }; exit 3",
        'pwd; echo "$A"; echo "[$B]"; ls; f',
    )
    assert results[0] == ToolResult("exit code 3", error=True)
    assert results[1].text.startswith('~/kernels\ntwo\nlines "quoted"\n[]\na.cpp\n') and results[1].error


def test_output_is_one_stream_in_order_and_the_folders_address_is_not_in_it(bash, parent):
    assert bash("echo a; echo b >&2; echo c").text == "a\nb\nc"
    assert bash("true").text == "(no output)"
    text = bash('pwd; echo "$PATH $TMPDIR"; ls ..; cat nothing; python3 -c "import os; print(os.getcwd())"').text
    assert parent._folder not in text and tempfile.gettempdir() + "/" not in text


def test_syntax_errors_and_quotes_are_the_commands_own_affair(bash):
    result = bash("echo 'unfinished")
    assert result.error and "unexpected EOF" in result.text
    assert bash("echo \"a'b\" 'c\"d' $((1+2)) | tr a-z A-Z").text == "A'B C\"D 3"


def test_output_is_bounded_and_keeps_both_ends(bash):
    result = bash("echo begin; head -c 50000000 /dev/zero | tr '\\0' x; echo; echo end")
    assert result.text.startswith("begin\nxxx") and result.text.endswith("xxx\nend")
    assert len(result.text) < 4200 and re.search(r"\[\d+ bytes cut\]", result.text)


def test_binary_output_becomes_text(bash):
    assert "\0" not in bash("head -c 300 /dev/urandom; printf '\\0\\377'").text


def test_a_command_that_takes_too_long_is_killed_with_all_it_started(bash):
    results = bash("export A=1; (setsid sleep 100 &) ; sleep 100", "echo alive $A; jobs")
    assert results[0].error and results[0].text == "[killed after 4 s]"
    assert results[1].text == "alive"  # what a killed command exported is lost


def test_a_shorter_time_can_be_asked_for_but_no_longer_one(use):
    async def body(workspace):
        short = await workspace.call("Bash", {"command": "sleep 50", "timeout": 0.2})
        long = await workspace.call("Bash", {"command": "sleep 50", "timeout": "1000"})
        return short.text, long.text

    assert use(body) == ("[killed after 0.2 s]", "[killed after 4 s]")


def test_what_still_runs_when_a_command_returns_is_killed(bash):
    waits = "while [ ! -e go ]; do sleep 0.05; done; touch late"
    results = bash(f"({waits}) & setsid bash -c '{waits}' & disown -a", "touch go; sleep 0.5; ls")
    assert "go" in results[1].text and "late" not in results[1].text


def test_closing_its_streams_or_killing_its_shell_hurts_nobody_else(bash):
    results = bash("exec >&- 2>&- <&-; sleep 0.2", "kill -9 $$", "echo fine")
    assert [result.text for result in results] == ["(no output)", "exit code -9", "fine"]


# -------------------------------------------------------------------------------------------------------- what it uses


def test_a_fork_bomb_is_contained(bash):
    results = bash("bomb() { bomb | bomb & }; bomb; sleep 1", "echo fine")
    assert results[1].text == "fine"


def test_too_much_memory_is_refused_or_killed(bash):
    hog = 'python3 -c "x = bytearray(100 << 20); import time; time.sleep(3)" & '
    results = bash(hog * 4 + "wait", "python3 -c 'bytearray(1 << 30)'", "echo fine")
    assert "memory" in results[0].text and results[1].error and results[2].text == "fine"


def test_too_much_on_disk_is_killed(bash):
    results = bash("while :; do head -c 4000000 /dev/zero > f$RANDOM; done", "echo fine")
    assert results[0].text == "[killed: more than 32 MiB on disk]" and results[1].text == "fine"


# ------------------------------------------------------------------------------------------------------------ attacks


def test_files_outside_cannot_be_read_or_written(bash, tmp_path):
    canary = Path(tempfile.mkdtemp(dir="/tmp")) / "shadow"
    canary.parent.chmod(0o777)
    canary.write_text("secret")
    canary.chmod(0o666)
    try:
        text = bash(
            f"cat {canary}; echo x >> {canary}; ln {canary} l; cat l; ln -s {canary} s; cat s; ls /tmp /root"
        ).text
        assert "secret" not in text and text.count("ermission denied") >= 5
        for name in (
            "/etc/shadow",
            "/etc/passwd",
            "/proc/self/environ",
            "/proc/1/environ",
            "/dev/kmem",
            "/root/.profile",
        ):
            assert bash(f"cat {name}").error
        for name in ("/tmp/x", "/dev/shm/x", "/var/tmp/x", "/usr/bin/x", "../bin/verify", "../../x"):
            assert bash(f"echo x > {name}").error
        assert canary.read_text() == "secret"
    finally:
        canary.unlink()
        canary.parent.rmdir()


def test_links_to_the_outside_give_the_other_tools_nothing(use):
    async def body(workspace):
        await workspace.call(
            "Bash", {"command": "ln -s /proc/self/environ e; ln -s /etc d; ln -s /usr/include i; mkfifo f"}
        )
        reads = [await workspace.call("Read", {"path": path}) for path in ("e", "d/passwd", "i/math.h", "f")]
        grep = await workspace.call("Grep", {"pattern": ".", "path": "i"})
        return reads, grep, await workspace.files()

    reads, grep, files = use(body)
    assert all(read.error for read in reads) and grep.error
    assert files == FILES


PYTHON_ATTACKS = {
    "a socket": "import socket; socket.socket()",
    "a pair of sockets": "import socket; socket.socketpair()",
    "a user namespace": "import ctypes, os; l = ctypes.CDLL(None); os._exit(1 if l.unshare(0x10000000) else 0)",
    "a trace of its worker": "import ctypes, os; os._exit(1 if ctypes.CDLL(None).ptrace(16, WORKER, 0, 0) else 0)",
    "its worker's memory": "open('/proc/WORKER/mem', 'rb').read(1)",
    "its worker's environment": "open('/proc/WORKER/environ', 'rb').read(1)",
    "its worker's descriptors": "import os; os.listdir('/proc/WORKER/fd')",
    "the parent's memory": "open('/proc/PARENT/mem', 'rb').read(1)",
    "the parent's environment": "open('/proc/PARENT/environ', 'rb').read(1)",
    "the client's memory": "open('/proc/CLIENT/mem', 'rb+')",
    "its worker killed": "import os; os.kill(WORKER, 9)",
    "its worker stopped": "import os; os.kill(WORKER, 19)",
    "the parent killed": "import os; os.kill(PARENT, 9)",
    "the client killed": "import os; os.kill(CLIENT, 0)",
    "its worker's limits": "import resource; resource.prlimit(WORKER, resource.RLIMIT_CPU, (0, 0))",
    "its worker's priority": "import os; os.setpriority(os.PRIO_PROCESS, WORKER, 19)",
    "the priority of all its user's": "import os; os.setpriority(os.PRIO_USER, 0, 19)",
    "its worker's scheduling": "import os; os.sched_setscheduler(WORKER, os.SCHED_IDLE, os.sched_param(0))",
    "more processes": "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (10**4, 10**4))",
    "another user": "import os; os.setuid(0)",
    "a memory file": "import os; os.memfd_create('x')",
}


@pytest.mark.parametrize("prize", PYTHON_ATTACKS)
def test_a_shell_does_not_get(prize, use, parent):
    async def body(workspace):
        worker = (await workspace.call("Bash", {"command": "echo $PPID"})).text
        attack = PYTHON_ATTACKS[prize].replace("WORKER", worker).replace("CLIENT", str(os.getpid()))
        attack = attack.replace("PARENT", str(parent._process.pid))
        ran = await workspace.call("Bash", {"command": "python3 -c 'print(1 + 1)'"})
        result = await workspace.call("Bash", {"command": f'python3 -c "{attack}"'})
        still = await workspace.call("Bash", {"command": "echo fine"})
        return ran, result, still

    ran, result, still = use(body)
    assert ran.text == "2" and still.text == "fine"
    assert result.error, result.text


def test_killing_everything_kills_nothing_outside(bash):
    results = bash("kill -9 -1; kill -9 0; echo x", "echo fine")
    assert results[1].text == "fine"


def test_a_shell_knows_no_secret_and_inherits_nothing(bash, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    names = {line.partition("=")[0] for line in bash("env").text.splitlines()}
    assert names <= {"PATH", "HOME", "TMPDIR", "LANG", "PWD", "OLDPWD", "SHLVL", "_"}
    opened = "python3 -c 'import os\nfor n in range(256):\n  try: os.fstat(n); print(n)\n  except OSError: pass'"
    assert bash(opened).text.split() == ["0", "1", "2", "198"]  # 198: what it leaves behind


def test_a_workspace_cannot_reach_another(loop, parent):
    async def both():
        async with parent.open(FILES, PROTECTED, echo) as one, parent.open(FILES, PROTECTED, echo) as two:
            await one.call("Bash", {"command": "echo mine > secret; chmod -R a+rwX ~ ~/.."})
            pid = (await one.call("Bash", {"command": "echo $PPID"})).text
            mine = (await one.call("Bash", {"command": "printf %s ~ | tail -c 100"})).text
            found = await two.call(
                "Bash", {"command": f"cd ~/../..; ls; cat [0-9]*/*/secret; kill -9 {pid}; echo {mine}"}
            )
            return found, await one.call("Bash", {"command": "cat secret"})

    found, after = loop.run(both())
    assert "mine\n" not in found.text and after.text == "mine"


def test_protected_files_cannot_be_changed_from_the_shell_either(use):
    async def body(workspace):
        commands = (
            "echo easy > model.py",
            "rm -f model.py SKILL.md",
            "rm model.py; mkdir -p model.py/a",
            "chmod 0 ~ model.py",
        )
        texts = []
        for command in commands:
            texts.append((await workspace.call("Bash", {"command": command})).text)
            assert (await workspace.files()) == FILES
            assert (await workspace.call("Read", {"path": "model.py"})).text == "task\n"
        return texts

    texts = use(body)
    assert texts[0] == "[model.py is protected: its content was restored]"
    assert "SKILL.md is protected" in texts[1]


# ------------------------------------------------------------------------------------------ compile, verify and profile


def test_commands_reach_the_client_with_their_arguments_and_the_files(bash):
    result = bash("verify --fast 'two words' ''; echo $?; cd kernels && compile && profile | tr a-z A-Z")
    lines = result.text.splitlines()
    assert lines[0] == f"verify ['--fast', 'two words', ''] {sorted(FILES)}"
    assert lines[1] == "1"
    assert lines[2].startswith("compile []") and lines[3].startswith("PROFILE []")


def test_a_command_sees_the_folder_as_it_is_and_the_task_as_it_was(bash):
    seen = []

    async def look(name, argv, files):
        seen.append(files)
        return CommandResult("line one\nline two")

    result = bash("echo '{}' > plan.json; echo easy > model.py; x=$(verify); echo \"[$x]\"", commands=look)
    assert result.text.startswith("[line one\nline two]")
    assert seen == [FILES | {"plan.json": "{}\n"}]


def test_a_command_can_change_files_which_the_agent_then_knows(use):
    async def restore(name, argv, files):
        return CommandResult("restore: ok", files={"kernels/a.cpp": "int y;\n", "deep/b.cpp": "b\n", "plan.json": None})

    async def session(workspace):
        told = await workspace.call("Bash", {"command": "echo '{}' > plan.json; restore && cat kernels/a.cpp"})
        edit = {"path": "kernels/a.cpp", "old_string": "y", "new_string": "z"}
        return told, await workspace.call("Edit", edit), await workspace.files()

    told, edited, files = use(session, commands=restore)
    assert told == ToolResult("restore: ok\nint y;") and edited == ToolResult("ok")
    assert files == FILES | {"kernels/a.cpp": "int z;\n", "deep/b.cpp": "b\n"}


@pytest.mark.parametrize("path", ["model.py", "../a.cpp", "kernels", "/etc/passwd", "out/a.cpp"])
def test_a_command_changes_no_file_that_the_agent_may_not_change(bash, tmp_path, path):
    async def restore(name, argv, files):
        return CommandResult("restore: ok", files={path: None})

    result = bash(f"ln -s {tmp_path} out; restore; echo $?", commands=restore)
    assert result.text.startswith("error: ") and result.text.endswith("\n1")
    assert not list(tmp_path.iterdir())


def test_commands_side_by_side_each_get_their_own_answer(bash):
    async def slow(name, argv, files):
        await asyncio.sleep(0.02)
        return CommandResult(f"{name} {argv[0]}")

    result = bash("for i in 1 2 3 4 5; do verify $i > o$i & done; wait; cat o?", commands=slow)
    assert result.text == "verify 1\nverify 2\nverify 3\nverify 4\nverify 5"


def test_commands_work_from_programs_that_the_shell_runs(bash):
    result = bash(
        "python3 -c \"import subprocess; print(subprocess.run(['verify', 'x'], capture_output=True).stdout)\""
    )
    assert result.text.startswith("b\"verify ['x']")


def test_the_time_of_an_answer_is_not_the_commands_time(loop):
    async def slow(name, argv, files):
        await asyncio.sleep(3.5)
        return CommandResult("late")

    async def body():
        async with (
            Workspaces(CommandLimits(shell_seconds=3.0)) as parent,
            parent.open(FILES, PROTECTED, slow) as workspace,
        ):
            return await workspace.call("Bash", {"command": "verify; echo after"})

    assert loop.run(body()) == ToolResult("late\nafter")


def test_asking_without_end_stops(bash):
    result = bash("for i in $(seq 40); do verify; done")
    assert result.text.count("verify []") == 20 and result.text.count("too many requests in one command") == 20


def test_forged_requests_and_broken_pipes_are_the_shells_own_loss(bash):
    results = bash(
        "p=$(sed -n 's/.*> \\(.*requests\\)/\\1/p' ~/../bin/verify); "
        "head -c 20000 /dev/urandom > $p; printf '1\\037verify\\036' > $p; printf '../../x\\037verify\\036' > $p; "
        "echo sent",
        "rm -f ~/../pipes/requests; mkdir ~/../pipes/requests; chmod 0 ~/../pipes ~/../tmp",
        "verify",
    )
    assert results[0].text == "sent" and results[2].text.startswith("verify []")


def test_an_exception_of_the_client_comes_through(use):
    async def broken(name, argv, files):
        raise KeyError("judge")

    with pytest.raises(KeyError, match="judge"):
        use(lambda workspace: workspace.call("Bash", {"command": "verify"}), commands=broken)


# ------------------------------------------------------------------------------------------------------ the other tools


def test_a_session_of_file_tools(use):
    async def body(workspace):
        calls = [
            ("Write", {"path": "kernels/b.cpp", "content": "float y;\n"}),
            ("Read", {"path": "kernels/b.cpp"}),
            ("Edit", {"path": "kernels/b.cpp", "old_string": "float", "new_string": "double"}),
            ("MultiEdit", {"path": "kernels/b.cpp", "edits": [{"old_string": "y", "new_string": "z"}]}),
            ("Grep", {"pattern": "(int|double) [xz]"}),
            ("Grep", {"pattern": "int", "path": "kernels", "glob": "a*"}),
            ("Glob", {"pattern": "kernels/*"}),
            ("TodoWrite", {"todos": [{"content": "go on", "status": "pending"}]}),
            ("Write", {"path": "kernels/a.cpp", "content": ""}),
            ("Write", {"path": "a.ipynb", "content": '{"cells": []}'}),
            ("NotebookEdit", {"path": "a.ipynb", "new_source": "x", "cell_type": "code", "edit_mode": "insert"}),
            ("NotebookEdit", {"path": "kernels/b.cpp", "new_source": "x", "cell_id": "cell-0"}),
        ]
        return [(await workspace.call(*call)).text for call in calls]

    assert use(body) == [
        "ok", "float y;\n", "ok", "ok", "kernels/a.cpp:1:int x;\nkernels/b.cpp:1:double z;", "kernels/a.cpp:1:int x;",
        "kernels/a.cpp\nkernels/b.cpp", "ok", "error: read kernels/a.cpp first",
        "ok", "ok", "error: the file is not a Jupyter notebook",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "tool, arguments, text",
    [
        ("Teleport", {}, "there is no tool 'Teleport'"),
        ("Bash", {}, "Bash needs command"),
        ("Bash", {"command": 3}, "Bash: command must be text"),
        ("Bash", {"command": "   "}, "command is empty"),
        ("Bash", {"command": "x" * 200_000}, "the command is too long or not text"),
        ("Bash", {"command": "x\0y"}, "the command is too long or not text"),
        ("Bash", {"command": "ls", "timeout": "nan"}, "Bash: timeout must be a number above zero"),
        ("Bash", {"command": "ls", "colour": "red"}, "Bash has no parameter 'colour'"),
        ("Read", {"path": ["x"]}, "Read: path must be text"),
        ("Write", {"path": "x", "content": None}, "Write needs content"),
        ("NotebookEdit", {"path": "x", "new_source": None, "edit_mode": "delete"}, "NotebookEdit needs new_source"),
        ("Read", {"path": "model.py", "offset": "-1"}, "Read: offset must be an integer above zero"),
        ("Read", {"path": "../x"}, "../x is outside the work folder"),
        ("MultiEdit", {"path": "model.py", "edits": "all"}, "MultiEdit: edits must be a list"),
        ("Edit", {"path": "a", "old_string": "x", "new_string": "y", "replace_all": 2}, "true or false"),
        ("Grep", {"pattern": "("}, "nmatched"),
        ("Write", {"path": "model.py", "content": "easy"}, "model.py is protected"),
        ("Write", {"path": "x", "content": "\ud800"}, "the content is not text"),
    ],
)
def test_wrong_arguments_are_an_error_that_says_what(use, tool, arguments, text):
    result = use(lambda workspace: workspace.call(tool, arguments))
    assert result.error and text in result.text


def test_arguments_that_cannot_be_sent_are_refused_here(use):
    async def body(workspace):
        deep = []
        for _ in range(100_000):
            deep = [deep]
        huge = await workspace.call("Write", {"path": "x", "content": "x" * ARGUMENT_BYTES})
        odd = [await workspace.call("Write", {"path": "x", "content": content}) for content in (deep, b"x", {1, 2})]
        return [huge, *odd, await workspace.call("Bash", {"command": "echo fine"})]

    *refused, fine = use(body)
    assert all(result.error for result in refused) and fine.text == "fine"


def test_text_counts_as_the_number_or_truth_value_it_spells():
    assert checked("Read", {"path": "x", "offset": "2"}) == {"path": "x", "offset": 2}
    edit = {"path": "x", "old_string": "", "new_string": "", "replace_all": "True"}
    assert checked("Edit", edit)["replace_all"] is True
    assert cut("x" * 100, 10).startswith("xxxxx\n[90 characters cut]")


# ------------------------------------------------------------------------------------------------------ life and death


def test_a_folder_goes_with_its_workspace(bash, parent, loop):
    bash("mkdir -p closed/a; touch closed/a/b; chmod 0 closed; d=x; for i in $(seq 200); do mkdir $d; cd $d; done")

    async def empty():
        for _ in range(200):
            if not folders(parent):
                return True
            await asyncio.sleep(0.02)

    assert loop.run(empty())


def test_a_worker_that_dies_is_a_fault_of_ours_and_the_next_one_is_well(use, bash, parent):
    async def body(workspace):
        worker = int((await workspace.call("Bash", {"command": "echo $PPID"})).text)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(WorkspaceLost):
            await workspace.call("Bash", {"command": "echo"})
        with pytest.raises(WorkspaceLost):
            await workspace.files()

    use(body)
    assert bash("echo fine").text == "fine"


def test_a_worker_that_hangs_is_a_fault_of_ours(loop, monkeypatch):
    async def body():
        async with Workspaces() as parent, parent.open(FILES, PROTECTED, echo) as workspace:
            worker = int((await workspace.call("Bash", {"command": "echo $PPID"})).text)
            os.kill(worker, signal.SIGSTOP)
            monkeypatch.setattr("cuda_agent.sandbox.workspace.client._GRACE_SECONDS", 0.1)
            monkeypatch.setattr(workspace, "_limits", CommandLimits(shell_seconds=0.4))
            with pytest.raises(WorkspaceLost, match="does not answer"):
                await workspace.call("Bash", {"command": "echo"})

    loop.run(body())


def test_a_parent_that_died_is_started_again(loop):
    async def body():
        async with Workspaces() as parent:
            parent._process.kill()
            await parent._process.wait()
            async with parent.open(FILES, PROTECTED, echo) as workspace:
                return (await workspace.call("Bash", {"command": "echo fine"})).text

    assert loop.run(body()) == "fine"


def test_a_call_that_was_cut_off_leaves_the_workspace_unusable(use):
    async def body(workspace):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await workspace.call("Bash", {"command": "sleep 1"})
        with pytest.raises(WorkspaceLost):
            await workspace.call("Bash", {"command": "echo"})

    use(body)


def test_many_at_once(loop):
    async def one(parent, number):
        async with parent.open(FILES, PROTECTED, echo) as workspace:
            return (
                await workspace.call("Bash", {"command": f"verify {number} | cut -c1-12; echo {number} > x; cat x"})
            ).text

    async def all_of_them():
        async with Workspaces(CommandLimits(shell_seconds=60.0)) as parent:
            return await asyncio.gather(*(one(parent, number) for number in range(10, 42)))

    assert loop.run(all_of_them()) == [f"verify ['{n}'\n{n}" for n in range(10, 42)]


def test_nothing_is_left_when_the_client_is_killed(tmp_path):
    script = textwrap.dedent(
        """
        import asyncio, os
        from cuda_agent.sandbox.workspace.client import Workspaces
        async def main():
            async with Workspaces() as parent, parent.open({}, frozenset(), None) as workspace:
                call = asyncio.create_task(workspace.call("Bash", {"command": "sleep 1000"}))
                await asyncio.sleep(0.1)
                print(parent._process.pid, parent._folder, flush=True)
                await call
        asyncio.run(main())
        """
    )
    client = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid, folder = client.stdout.readline().split()
    client.kill()
    client.wait()
    for _ in range(500):
        gone = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip()[:1] in (
            "",
            "Z",
        )
        if gone and not os.path.exists(folder):
            break
        signal.sigtimedwait([], 0.02)
    assert gone and not os.path.exists(folder)
