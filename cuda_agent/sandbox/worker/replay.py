"""Runs solutions that start compilers, in two passes.

A first pass runs the solution and records each program that the solution starts. The second pass, which is the judged
run, starts no program: the solution gets the recorded result, and the program's files already exist. For example,
``load_inline`` calls ninja, finds that everything is built, and imports the library. The solution's own process writes
the recording, so the sandbox's security must not depend on the recording."""

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from cuda_agent.sandbox.messages import Frame
from cuda_agent.sandbox.wire import NO_PROGRAMS
from cuda_agent.sandbox.worker import stand_ins
from cuda_agent.sandbox.worker.loop import WorkerLoop, build_model, causes, explain, run_module
from cuda_agent.sandbox.worker.same_files import keep_files, with_own_tmp
from cuda_agent.sandbox.worker.shared_tensors import draw, flatten, rebuild

_NOTES = "programs.json"
_LOG = 1 << 18  # most characters of a reported error
_RealPopen = subprocess.Popen


class RecordingPass(WorkerLoop):
    """Runs a solution once, in a process that may start compilers. ``run_first_pass`` returns ``None`` on success.
    Otherwise it returns a dictionary: ``error`` describes the solution's error, and ``log`` holds the messages of the
    error and its causes."""

    def run_first_pass(self, frame: Frame) -> dict[str, str] | None:
        place, device = Path(self._options["folder"]), self._options["device"]
        with contextlib.suppress(OSError):  # compilers may use every processor
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        _settle()
        link_libraries(place / "links", os.environ.get("CUDA_HOME", ""))
        keep_files(place, replayed=False)
        with contextlib.suppress(FileExistsError):  # the solution may bring files in it
            (place / "tmp").mkdir()
        stand_ins.write_headers(place, frame.body["headers"])
        notes: dict[str, Any] = {}
        _note_programs(notes)
        stand_ins.offer(place)
        try:
            task = run_module("task", frame.body["task"], "model.py")
            init = task.get_init_inputs()
            arguments, given = draw(task.get_inputs, device)
            model = build_model(with_own_tmp(frame.body["code"], place), list(init), self._options)
            flatten(model(*rebuild(arguments, given)))
            if device == "cuda":
                torch.cuda.synchronize()
        except MemoryError:
            return {"error": "out of memory", "log": ""}
        except BaseException as error:
            log = "\n".join(reversed([str(cause) for cause in causes(error)]))  # a compiler's message may be in any
            return {"error": explain(error), "log": log[-_LOG:]}
        (place / _NOTES).write_text(json.dumps(notes))
        return None


def _settle() -> None:
    """Applies settings that must be equal in both passes (recording and replay), because cache keys of the compilers
    depend on them."""
    if (extensions := sys.modules.get("torch.utils.cpp_extension")) is not None:  # imported before CUDA_HOME was set
        extensions.CUDA_HOME = os.environ.get("CUDA_HOME")  # type: ignore[attr-defined]
    import torch._inductor.config as config

    config.cpp_cache_precompile_headers = False  # precompiling takes longer than one graph, and uses a random folder


def link_libraries(links: Path, home: str) -> None:
    """Links the libraries of the CUDA installation ``home`` into the folder ``links`` under names without versions,
    which linkers need. Links nothing if ``home`` is empty."""
    links.mkdir(exist_ok=True)
    for library in sorted(Path(home, "lib").glob("lib*.so.*")) if home else []:
        with contextlib.suppress(FileExistsError):
            os.symlink(library, links / f"{library.name.partition('.so.')[0]}.so")


def _key(arguments: Any, folder: Any) -> str:
    listed = arguments if isinstance(arguments, str | bytes | os.PathLike) else list(arguments)
    return json.dumps([listed, folder or os.getcwd()], default=os.fsdecode)


def _note_programs(notes: dict[str, Any]) -> None:
    """Patches ``subprocess`` so that it records each program that it runs and waits for. A key in ``notes`` holds the
    command and the working directory. The value is ``[exit code, standard output, standard error]``, with ``None`` for
    an output that was not read."""

    class Noting(_RealPopen):  # type: ignore[type-arg]
        def __init__(self, args: Any, *more: Any, **options: Any) -> None:
            self._key = _key(args, options.get("cwd"))
            super().__init__(args, *more, **options)

        def communicate(self, *more: Any, **options: Any) -> Any:
            outputs = super().communicate(*more, **options)
            told = [o.decode(errors="replace") if isinstance(o, bytes) else o for o in outputs]
            notes[self._key] = [self.returncode, *told]
            return outputs

        def wait(self, *more: Any, **options: Any) -> int:
            code = super().wait(*more, **options)
            notes.setdefault(self._key, [code, None, None])
            return code

    subprocess.Popen = Noting  # type: ignore[misc]


def play_back(place: Path) -> None:
    """Patches ``subprocess`` so that it returns the recorded results of programs instead of running them, and refuses
    all programs that are not recorded. ``place`` is the folder of the first pass (the run that recorded them). Also
    makes the files of the first pass available (see ``same_files``)."""
    _settle()
    notes = json.loads((place / _NOTES).read_text())

    class Played(_RealPopen):  # type: ignore[type-arg]
        def __init__(self, args: Any, *more: Any, **options: Any) -> None:
            self._child_created = False  # read by the destructor of the real class
            self.args, self.pid = args, 0
            found = notes.get(_key(args, options.get("cwd")))
            if found is None:
                name = args if isinstance(args, str | bytes) else next(iter(args), "")
                raise PermissionError(errno.EPERM, f"{NO_PROGRAMS}, and in the first pass it was not: {name!r}")
            self.returncode = found[0]
            as_text = any(options.get(word) for word in ("text", "universal_newlines", "encoding", "errors"))
            said = [output or "" for output in found[1:]]
            wanted = [options.get(name) == subprocess.PIPE for name in ("stdout", "stderr")]
            self._told: list[Any] = [
                (text if as_text else text.encode()) if piped else None
                for text, piped in zip(said, wanted, strict=True)
            ]
            stream = io.StringIO if as_text else io.BytesIO
            self.stdin = None
            self.stdout, self.stderr = (None if told is None else stream(told) for told in self._told)

        def communicate(self, *_: Any, **__: Any) -> Any:
            return tuple(self._told)

        def wait(self, *_: Any, **__: Any) -> int:
            return int(self.returncode)

        poll = wait

    subprocess.Popen = Played  # type: ignore[misc]
    _take_no_locks()
    keep_files(place, replayed=True)
    stand_ins.offer(place)


def _take_no_locks() -> None:
    """Makes file locks do nothing in the second pass (the judged run). There, lock files cannot be opened for writing,
    and no other process uses these locks."""
    import filelock
    from torch.utils.file_baton import FileBaton

    def acquire(self: Any) -> None:
        self._context.lock_file_fd = os.open(os.devnull, os.O_RDWR)

    def release(self: Any) -> None:
        os.close(self._context.lock_file_fd)
        self._context.lock_file_fd = None

    filelock.UnixFileLock._acquire = acquire  # type: ignore[method-assign]
    filelock.UnixFileLock._release = release  # type: ignore[method-assign]
    FileBaton.try_acquire = lambda self: True  # type: ignore[method-assign]
    FileBaton.release = lambda self: None  # type: ignore[method-assign]
