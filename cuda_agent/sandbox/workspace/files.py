"""Implements the file tools of a workspace (an agent's work folder), and collects the files of the folder.

The tools are Read, Write, Edit, MultiEdit and Glob. The tool NotebookEdit is in the module ``notebook``; it changes
files through ``Folder.change``. Everything in the folder may be hostile (links, FIFOs, huge or binary files, a million
names), so every path is resolved and every read is limited. The code runs inside the workspace's jail."""

import fnmatch
import hashlib
import itertools
import os
import posixpath
import stat
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

FILE_BYTES = 256 << 10  # of one file to read, write or collect
TOTAL_BYTES = 1 << 20  # of all collected files
FILES = 200  # most collected files
ENTRIES = 5000  # most entries of one walk
DEPTH = 12
READ_LINES = 2000


class ToolRefused(Exception):
    """A tool call is refused. The agent gets the message as the result of the call."""


class Folder:
    """An agent's work folder at the path ``root``, with the file tools. ``protected`` maps the name of each protected
    file to its required text, or to ``None`` if the file must not exist. The agent cannot change protected files. A
    tool changes another file only if the agent has read or written the file's current content with a tool. A tool
    raises ``ToolRefused`` if it refuses a call."""

    def __init__(self, root: str, protected: dict[str, str | None]) -> None:
        if any("/" in name for name in protected):
            raise ValueError("only files at the top of the folder can be protected")
        self.root = os.path.realpath(root)
        self._discarded = 0
        self.protected = protected
        self._seen: dict[str, bytes] = {}  # path -> sha256 of the content that the agent knows

    def read(self, path: str, offset: int = 1, limit: int = READ_LINES) -> str:
        """Returns at most ``limit`` lines of a text file, beginning with line ``offset`` (the first line is 1)."""
        name = self.resolve(path)
        text = self._text(name)
        self._seen[name] = _digest(text)
        lines = text.splitlines(keepends=True)
        first = max(offset, 1) - 1
        part = "".join(lines[first : first + min(max(limit, 1), READ_LINES)])
        return part or "(empty)"

    def write(self, path: str, content: str) -> str:
        name = self._writable(path)
        if os.path.lexists(os.path.join(self.root, name)):
            self._must_know(name)
        self._store(name, content)
        return "ok"

    def edit(self, path: str, old_string: str, new_string: str, replace_all: bool = False) -> str:
        edit = {"old_string": old_string, "new_string": new_string, "replace_all": replace_all}
        return self.multi_edit(path, [edit])

    def multi_edit(self, path: str, edits: list[dict[str, Any]]) -> str:
        """Applies all edits to the file in order, or none of them if one is refused."""
        name = self._writable(path)
        text = self._must_know(name)
        if not edits:
            raise ToolRefused("edits is empty")
        for number, edit in enumerate(edits, 1):
            where = f"edit {number}: " if len(edits) > 1 else ""
            old, new = edit["old_string"], edit["new_string"]
            count = text.count(old) if old else 0
            if count == 0:
                raise ToolRefused(f"{where}old_string not found in {name}")
            if old == new:
                raise ToolRefused(f"{where}old_string and new_string are the same")
            if count > 1 and not edit.get("replace_all"):
                raise ToolRefused(f"{where}old_string occurs {count} times in {name}")
            text = text.replace(old, new)
            if len(text) > FILE_BYTES:
                raise ToolRefused(f"{name} would be larger than {FILE_BYTES} bytes")
        self._store(name, text)
        return "ok"

    def change(self, path: str, edited: Callable[[str], str]) -> str:
        """Replaces the text of the file at ``path`` by the result of ``edited(text)``. Raises ``ToolRefused`` if the
        agent has not read or written the file's current text with a tool."""
        name = self._writable(path)
        self._store(name, edited(self._must_know(name)))
        return "ok"

    def glob(self, pattern: str, path: str = ".") -> str:
        """Returns the sorted paths below ``path`` that match ``pattern``, one per line. ``**`` matches any number of
        folders."""
        base = self.resolve(path)
        prefix = "" if base == "." else base + "/"
        parts = tuple(part for part in pattern.split("/") if part not in ("", "."))
        if len(parts) > DEPTH:
            raise ToolRefused("the pattern is too deep")
        names = (name for name, _ in self._walk(base))
        found = sorted(name for name in names if _matches(tuple(name[len(prefix) :].split("/")), parts))
        return "\n".join(found) or "(no matches)"

    def fill(self, files: dict[str, str]) -> None:
        """Writes the initial files (text by path). The agent must read such a file before it can change it with a
        tool."""
        for path, content in files.items():
            self._store(self.resolve(path), content)
        self._seen.clear()

    def put(self, files: dict[str, str | None]) -> None:
        """Writes each text in ``files`` to the file at its path. If the text is ``None``, removes the file instead. The
        agent can change the written files with a tool without reading them first. Raises ``ToolRefused`` if a file
        cannot be written or removed."""
        for path, content in files.items():
            name = self._writable(path)
            if content is not None:
                self._store(name, content)
                continue
            try:
                self._discard(os.path.join(self.root, name))
            except OSError as error:
                raise ToolRefused(f"{name}: {error.strerror}") from None

    def restore(self) -> list[str]:
        """Restores the folder's permissions and the protected files. Returns the names of the protected files that had
        changed."""
        changed = []
        os.chmod(self.root, 0o700)
        for name, content in self.protected.items():
            path = os.path.join(self.root, name)
            try:
                intact = not os.path.lexists(path) if content is None else self._text(name) == content
            except ToolRefused:
                intact = False
            if not intact:
                changed.append(name)
                self._discard(path)
                if content is not None:
                    self._store(name, content)
        return changed

    def collect(self) -> dict[str, str]:
        """Returns the folder's regular UTF-8 files, as text by path. Protected files come first, with their original
        text. The other files follow, the ones nearest to the top of the folder first. Skips a file that is larger than
        ``FILE_BYTES``, or with which all files together would be larger than ``TOTAL_BYTES``. Stops at ``FILES``
        files."""
        kept = {name: content for name, content in self.protected.items() if content is not None}
        files, total = dict(kept), sum(map(len, kept.values()))
        for name, size in sorted(self._walk("."), key=lambda item: (item[0].count("/"), item[0])):
            if name in self.protected or size is None or size > FILE_BYTES or total + size > TOTAL_BYTES:
                continue
            try:
                files[name] = self._text(name)
            except ToolRefused:
                continue
            total += size
            if len(files) >= FILES:
                break
        return files

    def resolve(self, path: str) -> str:
        """Returns ``path`` relative to the work folder, after following links. Raises ``ToolRefused`` if ``path`` is
        not valid or leads out of the folder."""
        if not isinstance(path, str) or not path or len(path) > 1024 or "\0" in path or not path.isprintable():
            raise ToolRefused("not a path")
        if path == "~" or path.startswith("~/"):
            path = path[2:] or "."
        full = os.path.realpath(os.path.join(self.root, path))
        if full != self.root and not full.startswith(self.root + "/"):
            raise ToolRefused(f"{path} is outside the work folder")
        return posixpath.relpath(full, self.root)

    def _writable(self, path: str) -> str:
        name = self.resolve(path)
        if name in self.protected:
            raise ToolRefused(f"{name} is protected")
        if os.path.isdir(os.path.join(self.root, name)):
            raise ToolRefused(f"{name} is a folder")
        return name

    def _must_know(self, name: str) -> str:
        text = self._text(name)
        if name not in self._seen:
            raise ToolRefused(f"read {name} first")
        if self._seen[name] != _digest(text):
            raise ToolRefused(f"{name} has changed: read it again")
        return text

    def _text(self, name: str) -> str:
        try:
            descriptor = os.open(os.path.join(self.root, name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise ToolRefused(f"{name} does not exist") from None
        except OSError as error:
            raise ToolRefused(f"{name}: {error.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ToolRefused(f"{name} is not a file")
            data = b""
            while len(data) <= FILE_BYTES and (part := os.read(descriptor, FILE_BYTES + 1)):
                data += part
        finally:
            os.close(descriptor)
        if len(data) > FILE_BYTES:
            raise ToolRefused(f"{name} is larger than {FILE_BYTES} bytes")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ToolRefused(f"{name} is not text") from None

    def _store(self, name: str, content: str) -> None:
        """Writes a file atomically, through a temporary file in the same folder."""
        try:
            data = content.encode()
        except UnicodeEncodeError:
            raise ToolRefused("the content is not text") from None
        if len(data) > FILE_BYTES:
            raise ToolRefused(f"the content is larger than {FILE_BYTES} bytes")
        path = os.path.join(self.root, name)
        new = path + ".new~"
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._discard(new)
            with open(new, "xb") as file:
                file.write(data)
            os.replace(new, path)
        except OSError as error:
            raise ToolRefused(f"{name}: {error.strerror}") from None
        self._seen[name] = _digest(content)

    def _discard(self, path: str) -> None:
        """Removes the file at ``path``. If a folder is there, moves it out of the work folder instead, because it may
        be too deep to remove."""
        if os.path.isdir(path) and not os.path.islink(path):
            self._discarded += 1
            os.rename(path, f"{self.root}.discarded{self._discarded}")
        elif os.path.lexists(path):
            os.unlink(path)

    def _walk(self, base: str) -> Iterator[tuple[str, int | None]]:
        """Yields the path and the size of each file below ``base``, level by level. Goes at most ``DEPTH`` folders
        deep, and looks at most at ``ENTRIES`` entries. For files that are not regular, such as links, the size is
        ``None``."""
        pending, looked = deque([(base, 0)]), 0
        while pending:
            folder, depth = pending.popleft()
            try:
                with os.scandir(os.path.join(self.root, folder)) as scan:
                    entries = list(itertools.islice(scan, max(ENTRIES - looked, 0)))
            except OSError:
                continue
            looked += len(entries)
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = posixpath.normpath(f"{folder}/{entry.name}")
                try:
                    info = entry.stat(follow_symlinks=False)
                    name.encode()
                except (OSError, UnicodeEncodeError):
                    continue
                if stat.S_ISDIR(info.st_mode):
                    if depth < DEPTH:
                        pending.append((name, depth + 1))
                else:
                    yield name, info.st_size if stat.S_ISREG(info.st_mode) else None


def disk_use(root: str, limit: int) -> int:
    """Returns the bytes on disk below ``root``. Counts at least 4 KiB for each entry. Stops once the sum exceeds
    ``limit``."""
    total, pending = 0, [root]
    while pending and total <= limit:
        try:
            with os.scandir(pending.pop()) as scan:
                for entry in scan:
                    total += max(entry.stat(follow_symlinks=False).st_blocks * 512, 4096)
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    if total > limit:
                        break
        except OSError:
            continue
    return total


def _matches(names: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Returns whether the path ``names`` matches ``pattern``. Both are split at ``/``. ``**`` matches any number of
    folders."""
    reachable = {0}  # possible positions in the pattern
    for name in names:
        reachable = _skip(reachable, pattern)
        reachable = {at if pattern[at] == "**" else at + 1 for at in reachable if at < len(pattern) and (
            pattern[at] == "**" or fnmatch.fnmatchcase(name, pattern[at])
        )}  # fmt: skip
    return len(pattern) in _skip(reachable, pattern)


def _skip(reachable: set[int], pattern: tuple[str, ...]) -> set[int]:
    result = set(reachable)
    for at, part in enumerate(pattern):
        if at in result and part == "**":
            result.add(at + 1)
    return result


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
