"""Which of several installed compilers is used."""

from pathlib import Path

import pytest

from cuda_agent.optimize import standalone_cuda
from cuda_agent.sandbox.build import toolchain


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of NVIDIA's packages, with CUDA 9 and 13."""
    names = [
        "cu9/lib/libnvrtc.so.9",
        "cu13/lib/libnvrtc.so.9",
        "cu13/lib/libnvrtc.so.13",
        "cu9/bin/nvcc",
        "cu13/bin/nvcc",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(toolchain, "_packages", lambda: [tmp_path])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    for finder in (toolchain.find_nvrtc, toolchain.find_nvcc):
        monkeypatch.setattr(toolchain, finder.__name__, finder.__wrapped__)
    return tmp_path


def test_the_newest_cuda_is_chosen_by_number(packages: Path) -> None:
    assert toolchain.find_nvrtc().library == str(packages / "cu13" / "lib" / "libnvrtc.so.13")
    assert toolchain.find_nvcc().compiler == str(packages / "cu13" / "bin" / "nvcc")


def test_an_exported_file_chooses_the_same_nvrtc(packages: Path) -> None:
    assert standalone_cuda._toolchain.nvrtc_files()[0] == toolchain.find_nvrtc().library
