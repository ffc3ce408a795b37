"""Records spans: named intervals of time, which show what a run spends its time on.

Spans form a tree.  Inside ``recording``, ``span`` measures its ``with`` block, and writes a line to a file when the
block ends.  Elsewhere it does nothing.  A line is a JSON object:

    {"id": "00f067aa0ba902b7", "parent": "b7ad6b7169203331", "name": "play", "start": 1764323640123456789,
     "end": 1764323641123456789, "attributes": {"step": 3}}

``id`` and ``parent`` are 16 hexadecimal digits, or "" for no parent.  ``start`` and ``end`` are nanoseconds since 1970.
A child ends before its parent, so its line comes first.  ``pipeline.trace`` reads the files."""

import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, cast

MOST = 100_000  # spans of one file; of further ones, only the children of the file's root are kept
Manager = TypeVar("Manager", bound=AbstractAsyncContextManager[Any])


class _File:
    """An open file of spans.  All its spans are below the span ``root``, whose line may be in another file."""

    def __init__(self, path: Path, root: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115
        self.root, self.left = root, MOST

    def takes(self, parent: str) -> bool:
        """Counts one more span below ``parent``, and returns whether it is kept."""
        self.left -= 1
        return self.left >= 0 or parent == self.root

    def write(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk; a task that outlives the recording
            self.file.write(json.dumps(line).encode() + b"\n")  # one call, because other threads write, too


_FILE: ContextVar[_File | None] = ContextVar("file", default=None)
_PARENT: ContextVar[str] = ContextVar("parent", default="")


def new_id() -> str:
    return os.urandom(8).hex()


@contextmanager
def recording(path: Path, root: str) -> Iterator[None]:
    """Records the spans of the ``with`` block, and of the asyncio tasks that start in it, in the file ``path``.  They
    are below the span with the id ``root``."""
    file = _File(path, root)
    before = _FILE.get(), _PARENT.get()
    _FILE.set(file)
    _PARENT.set(root)
    try:
        yield
    finally:
        _FILE.set(before[0])
        _PARENT.set(before[1])
        file.file.close()


@contextmanager
def span(name: str, **attributes: Any) -> Iterator[dict[str, Any]]:
    """Records the ``with`` block as a span below the current one.  Yields the span's attributes, to which the block may
    add.  If the block raises an exception, its type becomes the attribute ``error``."""
    file, parent = _FILE.get(), _PARENT.get()
    if file is None or not file.takes(parent):
        yield attributes
        return
    own = new_id()
    _PARENT.set(own)
    start, begin = time.time_ns(), time.monotonic_ns()
    try:
        yield attributes
    except BaseException as error:
        attributes["error"] = type(error).__name__
        raise
    finally:
        _PARENT.set(parent)
        end = start + time.monotonic_ns() - begin
        file.write(_line(own, parent, name, start, end, attributes))


def add(name: str, start: int, end: int, *, id: str = "", parent: str | None = None, **attributes: Any) -> None:
    """Records a span from ``start`` to ``end``, in nanoseconds since 1970.  By default it has a new id, and the current
    span is its parent."""
    file, parent = _FILE.get(), _PARENT.get() if parent is None else parent
    if file is not None and file.takes(parent):
        file.write(_line(id or new_id(), parent, name, start, end, attributes))


def add_phases(seconds: Mapping[str, float]) -> None:
    """Records phases of known durations, one after the other, as spans below the current one.  The last one ends
    now."""
    if _FILE.get() is not None:
        start = time.time_ns() - round(sum(seconds.values()) * 1e9)
        for name, duration in seconds.items():
            add(name, start, start := start + round(duration * 1e9))


def opened(name: str, manager: Manager) -> Manager:
    """Returns an async context manager that does what ``manager`` does, and records two spans: ``open NAME`` and
    ``close NAME``."""

    @asynccontextmanager
    async def measured() -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            with span(f"open {name}"):
                value = await stack.enter_async_context(manager)
            yield value
            with span(f"close {name}"):
                await stack.aclose()

    return cast(Manager, measured())  # of the same type for ``async with``


def _line(id: str, parent: str, name: str, start: int, end: int, attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": id, "parent": parent, "name": name, "start": start, "end": end, "attributes": attributes}
