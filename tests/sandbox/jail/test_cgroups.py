"""Limits by control group: real ones where this process may make them, and how a place for them is found."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuda_agent.sandbox.jail import cgroups
from cuda_agent.sandbox.jail.cgroups import ControlGroup, Groups


@pytest.fixture
def groups() -> Groups:
    found = cgroups.find()
    if not found:
        pytest.skip("this process may make no control groups")
    return found


@pytest.fixture
def group(groups: Groups) -> Iterator[ControlGroup]:
    group = groups.make(memory_mb=64, tasks=8)
    yield group
    group.close()


def run(group: ControlGroup, code: str) -> subprocess.CompletedProcess[str]:
    """Python under the group's limits: it waits on its input until it is in the group."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", f"import sys, os, threading, time\nsys.stdin.readline()\n{code}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    group.add(process.pid)
    out, _ = process.communicate("go\n", timeout=30)
    return subprocess.CompletedProcess([], process.returncode, out)


def test_groups_of_two_makers_in_one_process_are_apart(groups: Groups) -> None:
    other = cgroups.find()
    assert other
    made = [one.make(memory_mb=64, tasks=8) for one in (groups, other, groups)]
    try:
        places = [{*group._folders.values()} for group in made]
        assert len(set.union(*places)) == sum(map(len, places))
    finally:
        for group in made:
            group.close()


def test_a_process_beyond_its_memory_is_ended_and_that_is_known(group: ControlGroup) -> None:
    done = run(group, "held = bytearray(200 << 20)\nprint('lived')")
    assert (done.returncode, done.stdout, group.killed()) == (-9, "", True)


def test_a_process_within_its_memory_lives(group: ControlGroup) -> None:
    done = run(group, "held = bytearray(20 << 20)\nprint('lived')")
    assert (done.returncode, done.stdout, group.killed()) == (0, "lived\n", False)


def test_tasks_beyond_the_limit_are_refused(group: ControlGroup) -> None:
    code = """
for number in range(20):
    try:
        threading.Thread(target=time.sleep, args=(0.5,)).start()
    except RuntimeError:
        print(number)
        break
"""
    assert int(run(group, code).stdout) == 7


def test_a_closed_group_is_gone(groups: Groups) -> None:
    group = groups.make(64, 8)
    folders = [*group._folders.values()]
    assert all(folder.exists() for folder in folders)
    group.close()
    assert not any(folder.exists() for folder in folders)


def test_groups_of_dead_judges_are_swept(groups: Groups) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    places = {*groups._places.values()}
    left = [place / f"cuda-agent-worker-1-{dead.pid}-0" for place in places]
    alive = [place / f"cuda-agent-worker-1-{os.getpid()}-900" for place in places]
    for folder in (*left, *alive):
        folder.mkdir()
    try:
        cgroups.find()
        assert not any(folder.exists() for folder in left)
        assert all(folder.exists() for folder in alive)
    finally:
        for folder in alive:
            folder.rmdir()


def tree(root: Path, *groups: str) -> None:
    """Plain folders with the files of version 2 that finding a place needs."""
    for group in groups:
        (root / group).mkdir(parents=True, exist_ok=True)
        (root / group / "cgroup.procs").write_text("")
        (root / group / "cgroup.subtree_control").write_text("memory pids" if group == "unit" else "")


def test_beside_a_group_that_holds_processes_is_a_place_too(tmp_path: Path) -> None:
    tree(tmp_path, "unit", "unit/service")
    # As the kernel answers for a group with processes: its children get no limits.
    (tmp_path / "unit/service/cgroup.subtree_control").unlink()
    (tmp_path / "unit/service/cgroup.subtree_control").mkdir()
    own = tmp_path / "own"
    own.write_text("0::/unit/service\n")
    found = cgroups.find(tmp_path, own)
    assert found and found.version == 2
    assert found._places["memory"] == tmp_path / "unit"


def test_a_version_2_group_holds_both_limits_in_one_folder(tmp_path: Path) -> None:
    tree(tmp_path, "unit")
    group = Groups({"memory": tmp_path / "unit", "pids": tmp_path / "unit"}, 2).make(100, 9)
    folder = group._folders["memory"]
    assert (folder / "memory.max").read_text() == str(100 << 20)
    assert (folder / "pids.max").read_text() == "9"
    (folder / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    assert group.killed()


@pytest.mark.parametrize("own", ["", "0::/\n", "4:memory:/\n", "0::/nowhere\n"])
def test_no_place_is_found_where_there_is_none(tmp_path: Path, own: str) -> None:
    file = tmp_path / "own"
    file.write_text(own)
    assert cgroups.find(tmp_path / "empty", file) is None
    assert cgroups.find(tmp_path / "empty", tmp_path / "missing") is None
