"""Creates, checks and removes temporary folders. A folder's name contains the process id of its owner."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "cuda-agent-"
_MOST_DEPTH = 16


def make_folder(kind: str) -> Path:
    """Creates a temporary folder of this process and returns its path. Other users can enter the folder, but cannot
    list it. Also removes the folders of processes that have ended. ``kind`` becomes a part of the folder's name."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-{os.getpid()}-"))
    folder.chmod(0o711)
    return folder


def remove(folder: Path) -> None:
    """Removes a folder with everything in it, even if the tree is too deep for a recursive function."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL)


def sweep() -> None:
    """Removes the temporary folders of processes that have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*-*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            remove(folder)


def entries(folder: Path) -> Iterator[tuple[os.DirEntry[str], int]]:
    """Yields each entry below ``folder`` with its depth. A folder comes before its content. Follows no links. Leaves
    out the content of subfolders that are removed meanwhile."""
    unread = [(str(folder), 1)]
    while unread:
        path, depth = unread.pop()
        try:
            listed = os.scandir(path)
        except FileNotFoundError:
            if path == str(folder):
                raise
            continue  # such as a compiler's temporary folder
        with listed:
            for entry in listed:
                yield entry, depth
                if entry.is_dir(follow_symlinks=False):
                    unread.append((entry.path, depth + 1))


def too_much(folder: Path, megabytes: int, files: int) -> str:
    """Returns a message if ``folder`` cannot be read, or if it exceeds a limit (``megabytes``, ``files`` or the depth).
    Otherwise returns an empty string."""
    count = size = 0
    try:
        for entry, depth in entries(folder):
            count += 1
            with contextlib.suppress(FileNotFoundError):  # a compiler's temporary file
                found = entry.stat(follow_symlinks=False)
                size += max(found.st_blocks * 512, found.st_size)  # a copy has no holes
            if depth > _MOST_DEPTH:
                return f"folders {depth} deep, {_MOST_DEPTH} are possible"
            if count > files:
                return f"more than {files} files"
            if size > megabytes << 20:
                return f"more than {megabytes} MB"
    except FileNotFoundError:  # the folder itself is gone
        return ""
    except OSError as error:
        return str(error.strerror)
    return ""
