"""Packages outside of Python's own folder, as images have them: a path file names where they lie."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROBE = """
import asyncio, sys
from pathlib import Path
from cuda_agent.config import SandboxConfig
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.tasks.task import Task

CODE = '''
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
def get_inputs():
    return [torch.rand(8, 8)]
def get_init_inputs():
    return []
'''

async def main():
    async with LocalSandbox(SandboxConfig(clock="model", checks=2), Path(sys.argv[1])) as sandbox:
        print(repr((await sandbox.probe(Task("t", CODE, ("relu",), "test"), compile=False)).error))

asyncio.run(main())
"""


def test_workers_read_packages_that_a_path_file_names(tmp_path):
    """A fresh interpreter whose only way to PyTorch is a path file, as in the images; a task is probed there."""
    site = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    own = next(bare.glob("lib/python*/site-packages"))
    (own / "environment.pth").write_text(f"{site}\n{ROOT}\n")
    done = subprocess.run(
        [str(bare / "bin" / "python"), "-c", PROBE, str(tmp_path / "cache")], capture_output=True, text=True,
        env={name: value for name, value in os.environ.items() if name[:6] != "PYTHON"}, cwd=tmp_path, timeout=180,
    )  # fmt: skip
    assert done.stdout.strip() in ("''", "None"), done.stdout + done.stderr
