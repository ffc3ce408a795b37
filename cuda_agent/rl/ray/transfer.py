"""Folders as messages: whole for small inputs, in parts for checkpoints, so that memory holds a few parts only."""

from collections.abc import Iterator
from pathlib import Path

Files = dict[str, bytes]  # path in a folder -> content
Part = tuple[str, bytes]  # path of a file in the folder, and the next bytes of its content
PART_BYTES = 64 << 20


def parts(folder: Path) -> Iterator[Part]:
    """Yields the files of a folder in parts, for ``keep``; an empty folder yields nothing."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        with open(path, "rb") as file:
            content = file.read(PART_BYTES)
            yield name, content
            while content := file.read(PART_BYTES):
                yield name, content


def keep(part: Part, folder: Path) -> None:
    name, content = part
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write(content)


def pack(folder: Path) -> Files:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def unpack(files: Files, folder: Path) -> None:
    for part in files.items():
        keep(part, folder)
