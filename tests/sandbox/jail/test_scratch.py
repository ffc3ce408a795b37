import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.sandbox.jail import scratch


def test_what_a_killed_process_left_goes_and_what_a_living_one_has_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "from cuda_agent.sandbox.jail import scratch; import os; print(scratch.make_folder('sandbox')); os._exit(9)"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    left = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout.strip()
    assert os.path.isdir(left)
    (tmp_path / "cuda-agent-notes").mkdir()
    mine = scratch.make_folder("workspaces")
    scratch.sweep()
    assert sorted(os.listdir(tmp_path)) == sorted(["cuda-agent-notes", mine.name])
    assert mine.stat().st_mode & 0o777 == 0o711


def test_a_folder_that_vanishes_hides_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(3 << 20))
    scan = os.scandir

    def scandir(path: str) -> Any:
        if str(path).endswith("c"):
            raise FileNotFoundError(2, "it vanished", path)
        return scan(path)

    monkeypatch.setattr(scratch.os, "scandir", scandir)
    assert scratch.too_much(tmp_path, 5, 100) == "more than 5 MB"
    assert scratch.too_much(tmp_path, 7, 100) == ""
    assert scratch.too_much(tmp_path / "nothing", 7, 100) == ""
