"""The warm parent: what workers that compile find imported already."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.sandbox.jail import warm_parent
from cuda_agent.sandbox.worker import gpu

# Every function of torch that asks the driver raises; a build for CUDA has them without a GPU, too.
ASKS_NOTHING = """
import torch
def refuse(*_, **__): raise SystemExit("the import asked the GPU")
names = [name for name in dir(torch._C) if name.startswith("_cuda_") and callable(getattr(torch._C, name))]
for name in names:
    setattr(torch._C, name, refuse)
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = refuse
import cuda_agent.sandbox.worker.gpu
for name in {imports!r}:
    __import__(name)
"""


@pytest.mark.nightly
def test_what_compiling_workers_find_imported_asks_no_gpu() -> None:
    """A fork of a process that asked could not use the GPU."""
    program = ASKS_NOTHING.format(imports=warm_parent._COMPILING[1:])
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"CUDA_HOME": "/nowhere"})


@pytest.mark.parametrize("pinned", [True, False])
def test_a_parent_of_measurements_keeps_its_processors_and_a_probers_may_use_all(tmp_path: Path, pinned: bool) -> None:
    parent = warm_parent.warm_parent(1, tmp_path / "log", pinned=pinned)
    try:
        parent.wait_ready()
        mine = os.sched_getaffinity(0)
        assert len(os.sched_getaffinity(parent.pid)) == (1 if pinned else len(mine))
    finally:
        parent.close()


def test_workers_see_the_gpus_that_this_process_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    parent = warm_parent.warm_parent(1, tmp_path / "log")
    try:
        parent.wait_ready()
        assert b"CUDA_VISIBLE_DEVICES=3" in Path(f"/proc/{parent.pid}/environ").read_bytes().split(b"\0")
    finally:
        parent.close()


class Parent:
    def __init__(self, imports: Any, fault: str) -> None:
        self.imports, self.fault, self.closed = imports, fault, False
        self.opened_gpu = fault == "opens the GPU"

    def wait_ready(self) -> None:
        if self.fault == "starts a thread":
            raise RuntimeError("the warm parent has 2 threads: its children could hang")

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("fault", ["", "opens the GPU", "starts a thread"])
def test_an_import_after_which_no_fork_works_is_left_to_the_workers(fault: str) -> None:
    parents: list[Any] = []

    def start(imports: Any) -> Any:
        parents.append(Parent(imports, fault if "torch._inductor.compile_fx" in imports else ""))
        return parents[-1]

    assert warm_parent.compiling_parent(start) is parents[-1]
    assert [parent.closed for parent in parents] == [True] * bool(fault) + [False]
    assert "cuda_agent.sandbox.worker.compiling" in parents[-1].imports and not parents[-1].fault


def test_an_open_file_of_the_device_shows_that_the_gpu_is_open(tmp_path: Path) -> None:
    device = tmp_path / "nvidia0"
    device.touch()
    assert not gpu.is_open(f"{tmp_path}/nvidia")
    with device.open():
        assert gpu.is_open(f"{tmp_path}/nvidia")
