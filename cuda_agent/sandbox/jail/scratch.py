"""Creates temporary folders named for the owning process, so that a later process can find and remove leftovers."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_PREFIX = "cuda-agent-"


def make_folder(kind: str) -> Path:
    """Create a folder of this process. Other users may pass through it (to their folders) but cannot list it."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-{os.getpid()}-"))
    folder.chmod(0o711)
    return folder


def remove(folder: Path) -> None:
    """Remove a folder with everything in it, even untrusted trees too deep for a recursive function."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL)


def sweep() -> None:
    """Remove the folders of dead processes."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*-*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            remove(folder)
