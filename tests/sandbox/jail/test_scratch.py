import os
import subprocess
import sys
import tempfile

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
