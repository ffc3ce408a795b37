"""Saves and loads the checkpoints of one stage in the store.  Keeps the two newest.

The names in the store contain the stage's cache key and a nonce (random characters that make the name unique):

    checkpoints/<stage>/<key>/<step>-<nonce>/<path>   the files
    checkpoints/<stage>/<key>/<step>-<nonce>.json     {"step", "files": {path: {"sha256", "size"}}}, written last

A checkpoint exists once its JSON file is written.  The files include the stage's metrics and notes up to the
checkpoint's step."""

import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cuda_agent.spans import span
from cuda_agent.storage import Store, StoreDamaged, file_sha256, files_below
from cuda_agent.tracking import FileTracker

KEEP = 2
_OWN = ".stage"  # folder of metrics, notes and clock inside a checkpoint


class StageCheckpoints:
    """The checkpoints of one stage.  Implements the protocol ``context.Checkpoints``.

    The attribute ``resumed`` lists the steps of the checkpoints from which the stage has resumed, in earlier processes
    and in this one."""

    def __init__(self, store: Store, stage: str, key: str, scratch: Path, tracker: FileTracker) -> None:
        self._store, self._prefix, self._scratch, self._tracker = store, f"checkpoints/{stage}/{key}", scratch, tracker
        self._began, self._before = time.monotonic(), 0.0
        self.resumed: list[int] = []

    @property
    def seconds(self) -> float:
        """Returns for how many seconds the stage has run so far.  If a checkpoint was loaded, includes the seconds
        before that checkpoint was saved."""
        return self._before + time.monotonic() - self._began

    @span("save checkpoint")
    def save(self, step: int, write: Callable[[Path], None]) -> None:
        name = f"{step:08d}-{secrets.token_hex(4)}"
        with tempfile.TemporaryDirectory(dir=self._scratch) as temporary:
            folder = Path(temporary)
            write(folder)
            self._tracker.save(folder / _OWN)
            clock = {"seconds": self.seconds, "resumed": self.resumed}
            (folder / _OWN / "clock.json").write_text(json.dumps(clock))
            files = {}
            for path in files_below(folder):
                relative = path.relative_to(folder).as_posix()
                self._store.put(f"{self._prefix}/{name}/{relative}", path)
                files[relative] = {"sha256": file_sha256(path), "size": path.stat().st_size}
        self._store.put(f"{self._prefix}/{name}.json", json.dumps({"step": step, "files": files}).encode())
        self._prune(name)

    @span("load checkpoint")
    def load(self, read: Callable[[Path], None]) -> int | None:
        for entry in reversed(self._entries()):
            with tempfile.TemporaryDirectory(dir=self._scratch) as temporary:
                folder = Path(temporary)
                try:
                    step = self._download(entry, folder)
                except StoreDamaged as error:
                    self._remove(entry)
                    self._tracker.note(f"checkpoint {entry} was damaged and is not used: {error}")
                    continue
                said = self._tracker.notes()  # notes of damage, and notes made since that checkpoint
                self._tracker.restore(folder / _OWN)
                for text in said:
                    self._tracker.note(text)
                clock = json.loads((folder / _OWN / "clock.json").read_text())
                shutil.rmtree(folder / _OWN)
                self._before, self._began = clock["seconds"], time.monotonic()
                self.resumed = [*clock["resumed"], step]
                read(folder)
                return step
        return None

    def clear(self) -> None:
        """Removes all checkpoints of the stage."""
        self._delete_below(self._prefix)

    def _entries(self) -> list[str]:
        """Returns the names of the complete checkpoints, sorted by step and, for equal steps, by time of writing."""
        found = []
        for key, (_, changed) in self._store.sizes(self._prefix).items():
            name = key.removeprefix(self._prefix + "/")
            if name.endswith(".json") and "/" not in name:
                found.append((name.split("-")[0], changed, name.removesuffix(".json")))
        return [name for _, _, name in sorted(found)]

    def _download(self, entry: str, folder: Path) -> int:
        try:
            index = json.loads(self._store.get(f"{self._prefix}/{entry}.json"))
            step, files = int(index["step"]), dict(index["files"])
        except (ValueError, KeyError, TypeError) as error:
            raise StoreDamaged(f"its index cannot be read ({error})") from error
        for relative, facts in files.items():
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            self._store.get_file(f"{self._prefix}/{entry}/{relative}", target, facts["sha256"])
        return step

    def _prune(self, newest: str) -> None:
        entries = [entry for entry in self._entries() if entry != newest]
        for entry in entries[: 1 - KEEP]:
            self._remove(entry)
        kept = {newest, *entries[1 - KEEP :]}
        for key in self._store.list(self._prefix):  # files of a save that never finished
            if key.removeprefix(self._prefix + "/").split("/")[0].removesuffix(".json") not in kept:
                self._store.delete(key)

    def _remove(self, entry: str) -> None:
        """Removes a checkpoint.  Deletes its JSON file first, so that after an interruption no JSON file lists
        missing files."""
        self._store.delete(f"{self._prefix}/{entry}.json")
        self._delete_below(f"{self._prefix}/{entry}")

    def _delete_below(self, prefix: str) -> None:
        for key in self._store.list(prefix):
            self._store.delete(key)
