"""A process that asked for it ends with its parent; a device has some memory."""

import subprocess
import sys
import time
from pathlib import Path

import torch

from cuda_agent import machine

CHILD = "from cuda_agent.machine import die_with_parent; die_with_parent({}); print('ready', flush=True); input()"
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert child.stdout.readline() == "ready\\n"
print(child.pid, flush=True)
input()
"""


def ended(pid: int) -> bool:
    """Gone, or waiting for a process that asks for its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_it_ends_when_its_parent_is_killed():
    arguments = [sys.executable, "-c", PARENT, CHILD.format("")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert not ended(child)
        parent.kill()
    limit = time.monotonic() + 10
    while not ended(child):
        assert time.monotonic() < limit, "it lives on"
        time.sleep(0.02)


def test_it_ends_at_once_when_its_parent_is_another_already():
    done = subprocess.run([sys.executable, "-c", CHILD.format(1)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 75 and done.stdout == ""


def test_the_memory_is_that_of_the_gpu_or_of_the_machine(monkeypatch):
    properties = type("Properties", (), {"total_memory": 141})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    for here, bytes_ in ((0, 80 * 10**9), (2, 141)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda here=here: here)
        assert machine.memory_bytes("cuda") == bytes_
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert 2**28 < machine.memory_bytes("cpu") <= 1024 * int(facts["MemTotal"].split()[0])


def test_processors_that_this_process_may_not_use_do_not_count(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 32)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert machine.cores() == 16
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert machine.cores() == 1
