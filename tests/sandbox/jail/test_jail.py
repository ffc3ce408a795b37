"""The jail: its walls hold, a missing one is named, and its filter is what it says."""

import json
import subprocess
import sys
from pathlib import Path

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
    ],
)  # fmt: skip
def test_what_the_filter_lets_through(name: str, argument: int, processes: bool, allowed: bool) -> None:
    for machine in ("x86_64", "aarch64"):
        program = jail.filter_program(machine, processes, pid=42)
        data = {0: jail._NUMBERS[machine][name], 4: jail._AUDIT_ARCH[machine], 16: argument}
        assert (interpret(program, data) == 0x7FFF0000) is allowed


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
