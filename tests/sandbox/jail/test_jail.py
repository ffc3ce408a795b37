"""The jail: its walls hold, a missing one is named, and its filter is what it says."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.config import SandboxConfig
from cuda_agent.errors import SandboxUnready
from cuda_agent.sandbox.jail import jail
from tests.sandbox.conftest import Running, one_judge, plan_solution, task

UNJAILED = """
import json, os, sys
from cuda_agent.sandbox.jail import jail
print(json.dumps(jail._attacks(sys.argv[1], os.getppid())))
"""

# A judge whose jailed child has the judge's user and no Landlock, as under an older kernel and an ordinary user.
JUDGE_ATTACKED_THROUGH_A_FILE = """
import fcntl, os, signal, time
from cuda_agent.sandbox.jail import jail
judge = os.getpid()
if (child := os.fork()) == 0:
    jail._landlock = lambda policy: None
    jail.enter(jail.JailPolicy(own_user=False))
    end, other = os.pipe()
    for command, value in ((10, signal.SIGKILL), (8, judge), (fcntl.F_SETFL, os.O_ASYNC)):  # F_SETSIG, F_SETOWN
        try:
            fcntl.fcntl(end, command, value)
        except PermissionError:
            pass
    os.write(other, b"x")
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_file_sends_no_signal_to_the_judge() -> None:
    judge = subprocess.run([sys.executable, "-c", JUDGE_ATTACKED_THROUGH_A_FILE], check=False)
    assert judge.returncode == 0, "a jailed child ended its judge" if judge.returncode == -signal.SIGKILL else ""


def test_the_proof_attacks_through_the_owner_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(jail.__file__).read_text()
    weaker = tmp_path / "jail.py"
    weaker.write_text(source.replace("in _OF_SIGNALS.items()", "in ()"))
    monkeypatch.setattr(jail, "__file__", str(weaker))
    with pytest.raises(jail.JailError, match=r"the wall 'seccomp' is missing: a jailed process .* owner of a file"):
        jail.prove(("seccomp",), tmp_path)


def test_every_default_wall_is_proven_here(tmp_path: Path) -> None:
    breaches = jail.prove(SandboxConfig().required_walls, tmp_path)
    assert not set(breaches) & {"no_new_privs", "landlock", "seccomp"}


def test_the_proof_notices_every_missing_wall(tmp_path: Path) -> None:
    """The same attacks without a jail get through, and the error names the wall."""
    (tmp_path / "canary").write_text("secret")
    child = subprocess.run(
        [sys.executable, "-c", UNJAILED, str(tmp_path / "canary")], capture_output=True, text=True, check=True
    )
    breaches = json.loads(child.stdout)
    for wall in ("no_new_privs", "landlock", "seccomp"):
        with pytest.raises(jail.JailError, match=f"the wall '{wall}' is missing: a jailed process "):
            jail.require(breaches, [wall])


def test_a_wall_that_does_not_exist_keeps_the_sandbox_unready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_judge(monkeypatch)
    running = Running(SandboxConfig(required_walls=["moat"]), tmp_path)
    with pytest.raises(SandboxUnready, match="no such wall: moat"):
        running.evaluate(task(), plan_solution())
    running.close()


def run_jailed(policy: jail.JailPolicy, script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        jail.command(policy, ["bash", "-c", script]),
        cwd=folder, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip


def test_a_jailed_program_sees_its_folder_only(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret").write_text("secret")
    policy = jail.JailPolicy(write=(str(tmp_path / "mine"),), execute=jail.SYSTEM_EXECUTE, read_any=True)
    script = "echo text > note; cat note; cat ../other/secret; echo x > ../other/new; cat /proc/1/environ; id -u"
    result = run_jailed(policy, script, tmp_path / "mine")
    lines = result.stdout.split()
    assert lines[0] == "text" and len(lines) == 2
    assert result.stderr.count("denied") == 3
    assert not (tmp_path / "other" / "new").exists()


def test_files_and_memory_of_a_jailed_program_are_limited(tmp_path: Path) -> None:
    policy = jail.JailPolicy(
        write=(str(tmp_path),), execute=jail.SYSTEM_EXECUTE, memory_mb=64, file_mb=1, read_any=True
    )
    run_jailed(policy, "head -c 3000000 /dev/zero > big", tmp_path)
    assert (tmp_path / "big").stat().st_size == 1 << 20
    assert (
        run_jailed(policy, "head -c 200000000 /dev/zero | tail -c 150000000 | wc -c", tmp_path).stdout.strip()
        != "150000000"
    )


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("processes", [True, False])
def test_the_filter_is_a_valid_program_for_both_machines(machine: str, processes: bool) -> None:
    program = jail.filter_program(machine, processes, pid=42)
    assert len(program) < 4096
    for index, (opcode, yes, no, _) in enumerate(program):
        assert opcode in (0x06, 0x15, 0x20, 0x35, 0x45)
        assert opcode == 0x06 or index + 1 + max(yes, no) < len(program)
    assert program[-1] == (0x06, 0, 0, 0x7FFF0000)


@pytest.mark.parametrize(
    ("name", "argument", "processes", "allowed"),
    [
        ("socket", 2, True, False), ("execve", 0, True, True), ("execve", 0, False, False),
        ("clone", 0x00010000, False, True), ("clone", 17, False, False), ("clone", 17, True, True),
        ("clone", 0x10000000, True, False), ("kill", 42, False, True), ("kill", 1, False, False),
        ("prctl", 22, True, False), ("prctl", 15, False, True), ("prctl", 1, False, False), ("ptrace", 0, True, False),
        ("sched_setaffinity", 0, True, True), ("sched_setaffinity", 0, False, False), ("fchmod", 3, False, False),
        ("fchmod", 3, True, True), ("sched_setaffinity", 1, True, False),
        *((name, 0, True, False) for name in ("semget", "semop", "semctl", "semtimedop", "msgget", "msgsnd", "msgrcv",
                                              "msgctl", "shmget", "shmat", "shmctl", "cachestat", "inotify_init1",
                                              "inotify_add_watch")),
    ],
)  # fmt: skip
def test_what_the_filter_lets_through(name: str, argument: int, processes: bool, allowed: bool) -> None:
    for machine in ("x86_64", "aarch64"):
        assert allows(machine, processes, name, argument) is allowed


F_DUPFD, F_GETFD, F_SETFL, F_SETOWN, F_SETSIG, F_SETOWN_EX, F_NOTIFY = 0, 1, 4, 8, 10, 15, 1026
O_ASYNC, O_NONBLOCK = 0o20000, 0o4000
FIONBIO, TCGETS, FIOASYNC, FIOSETOWN, SIOCSPGRP = 0x5421, 0x5401, 0x5452, 0x8901, 0x8902


@pytest.mark.parametrize(
    ("name", "command", "value", "allowed"),
    [
        ("fcntl", F_DUPFD, 3, True), ("fcntl", F_GETFD, 0, True), ("fcntl", F_SETFL, O_NONBLOCK, True),
        ("fcntl", F_SETFL, O_NONBLOCK | O_ASYNC, False), ("fcntl", F_SETOWN, 1, False),
        ("fcntl", F_SETOWN_EX, 1, False), ("fcntl", F_SETSIG, 9, False), ("fcntl", F_NOTIFY, 1, False),
        ("ioctl", FIONBIO, 1, True), ("ioctl", TCGETS, 0, True), ("ioctl", 0xC020462A, 0, True),
        ("ioctl", FIOASYNC, 1, False), ("ioctl", FIOSETOWN, 1, False), ("ioctl", SIOCSPGRP, 1, False),
    ],
)  # fmt: skip
def test_no_file_gets_an_owner_or_a_signal(name: str, command: int, value: int, allowed: bool) -> None:
    for machine in ("x86_64", "aarch64"):
        for processes in (True, False):
            assert allows(machine, processes, name, 3, command, value) is allowed


MAP_SHARED, MAP_PRIVATE, MAP_SHARED_VALIDATE, MAP_ANONYMOUS, MAP_NORESERVE = 1, 2, 3, 0x20, 0x4000


@pytest.mark.parametrize(
    ("flags", "allowed"),
    [
        (MAP_SHARED, True), (MAP_PRIVATE | MAP_ANONYMOUS, True), (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, True),
        (MAP_SHARED | MAP_ANONYMOUS, False), (MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, False),
        (MAP_SHARED_VALIDATE | MAP_ANONYMOUS, False),
    ],
)  # fmt: skip
def test_no_limit_counts_shared_memory_so_none_is_made(flags: int, allowed: bool) -> None:
    for machine in ("x86_64", "aarch64"):
        for processes in (True, False):
            assert allows(machine, processes, "mmap", 0, 6 << 30, 3, flags) is allowed
            assert allows(machine, processes, "mmap", 0, 6 << 30, 3, flags, shared_memory=True)


SHARED = """
import mmap
private = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE)
for make in (lambda: mmap.mmap(-1, 1 << 20), lambda: open("/dev/zero", "r+b")):
    try:
        make()
    except PermissionError:
        print("refused")
"""


def test_a_jailed_program_makes_no_shared_memory(tmp_path: Path) -> None:
    folders = (*jail.SYSTEM_EXECUTE, *jail.PYTHON)
    policy = jail.JailPolicy(read=(*jail.SYSTEM_READ, *jail.PYTHON), execute=folders, read_any=True)
    command = jail.command(policy, [sys.executable, "-c", SHARED])
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert (result.stdout, result.stderr) == ("refused\n" * 2, "")


def allows(machine: str, processes: bool, name: str, *arguments: int, **more: bool) -> bool:
    data = {0: jail._NUMBERS[machine][name], 4: jail._AUDIT_ARCH[machine], **{16 + 8 * at: 0 for at in range(6)}}
    data |= {16 + 8 * place: value & 0xFFFFFFFF for place, value in enumerate(arguments)}
    return interpret(jail.filter_program(machine, processes, pid=42, **more), data) == 0x7FFF0000


def test_another_calling_convention_is_killed() -> None:
    program = jail.filter_program("x86_64", True, pid=1)
    assert interpret(program, {0: 0x40000001, 4: jail._AUDIT_ARCH["x86_64"], 16: 0}) == 0x80000000
    assert interpret(program, {0: 1, 4: 0x40000003, 16: 0}) == 0x80000000


def interpret(program: list[tuple[int, int, int, int]], data: dict[int, int]) -> int:
    """The few BPF instructions that the filter uses, read naively."""
    position = accumulator = 0
    while True:
        opcode, yes, no, operand = program[position]
        position += 1
        if opcode == 0x06:
            return operand
        if opcode == 0x20:
            accumulator = data[operand]
        else:
            holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}[
                opcode
            ]
            position += yes if holds else no


def test_a_proof_that_takes_too_long_is_an_error_of_the_jail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never_ends(command: list[str], **how: Any) -> None:
        raise subprocess.TimeoutExpired(command, how["timeout"])

    monkeypatch.setattr(subprocess, "run", never_ends)
    with pytest.raises(jail.JailError, match="took more than 30 s"):
        jail.prove((), tmp_path)
    assert not list(tmp_path.iterdir())
