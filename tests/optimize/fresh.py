"""Starts Python processes that find PyTorch and its requirements, but no other installed package."""

import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def only_torch(folder: Path) -> Path:
    """Fills ``folder`` with links to PyTorch and its requirements, and returns ``folder``."""
    folder.mkdir(parents=True)
    pending, seen = ["torch", "numpy"], set()
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        pending += [re.match(r"[\w.-]+", line)[0] for line in found.requires or () if "extra ==" not in line]
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                os.symlink(found.locate_file(top), folder / top)
    return folder


def run(packages: Path, code: str, folder: Path, home: Path, *more: Path) -> subprocess.CompletedProcess[str]:
    """Runs the Python text ``code`` in ``folder`` and returns the finished process. The code can import only the
    standard library and modules in ``folder``, ``packages`` and ``more``."""
    standard = [sysconfig.get_path("stdlib"), sysconfig.get_path("stdlib") + "/lib-dynload"]
    path = [str(folder), *standard, *map(str, (packages, *more))]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:] = {path}\n{code}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
