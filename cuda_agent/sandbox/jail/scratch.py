"""Temporary folders of the sandbox: named for the process that owns them, so that a later one can tell what was left.

Not covered: the cache, which stays.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_PREFIX = "cuda-agent-"


def make_folder(kind: str) -> Path:
    """A new folder of this process.  Other users may pass through it (to folders of theirs), and see nothing."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-{os.getpid()}-"))
    folder.chmod(0o711)
    return folder


def remove(folder: Path) -> None:
    """With whatever untrusted code made in it: also folders that are too deep for a recursive function."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL)


def sweep() -> None:
    """Remove what killed processes left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*-*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            remove(folder)
