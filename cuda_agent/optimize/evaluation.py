"""Implements the command `evaluate`, which judges one solution: settings, files of the solution, verdict."""

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

from cuda_agent.compose import compose
from cuda_agent.config import Config, SandboxConfig
from cuda_agent.errors import ConfigError, TaskError
from cuda_agent.format_names import Format
from cuda_agent.optimize.shapes import ShapeResult, judge_shapes, variants
from cuda_agent.pipeline import runs
from cuda_agent.sandbox.formats.table import FORMATS
from cuda_agent.sandbox.wire import Mode, Solution, Verdict, printable
from cuda_agent.tasks.inspect import with_advice
from cuda_agent.tasks.task import Task

T = TypeVar("T")

LARGEST = 1 << 20  # most bytes of one file of a solution


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work`` and returns its result.  On SIGTERM, cancels ``work``, lets it clean up, and exits with status
    143."""
    stopped: list[int] = []

    async def whole() -> T:
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            if not stopped:
                task.cancel()
            stopped.append(signal.SIGTERM)

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)  # the handler ends with the loop
        return await work

    try:
        return asyncio.run(whole())
    finally:
        if stopped:
            raise SystemExit(128 + signal.SIGTERM)


async def with_clock(work: Coroutine[Any, Any, T], what: str, screen: TextIO, pause: float = 1.0) -> T:
    """Awaits ``work`` and returns its result.  If it takes longer than some ``pause`` seconds, writes ``what`` to
    ``screen``: on a terminal with the seconds so far, and elsewhere once."""
    task, began, shown = asyncio.ensure_future(work), time.monotonic(), False
    live = screen.isatty()
    try:
        while not (await asyncio.wait({task}, timeout=pause if live else 5 * pause))[0]:
            if live:
                screen.write(f"\r{what}: {time.monotonic() - began:.0f} s ")
            elif not shown:
                screen.write(f"{what}\n")
            screen.flush()
            shown = True
    finally:
        if live and shown:
            screen.write("\r\x1b[K")
            screen.flush()
        task.cancel()
        await asyncio.wait({task})  # after a cancellation it cleans up
    return task.result()


def solution_files(folder: Path) -> dict[str, str]:
    """Returns the files of the solution in ``folder``, text by path.  Reads plan.json, model_new.py and the files in
    kernels/, as far as they exist, and ignores other files.

    Raises:
        TaskError: ``folder`` is no folder, or a file is too large or not text; the message names the file."""
    if not folder.is_dir():
        raise TaskError(f"{folder}: expected a folder with plan.json and kernels/, or with model_new.py")
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if not any(known.belongs(name) for known in FORMATS.values()):
            continue
        if path.stat().st_size > LARGEST:
            raise TaskError(f"{path}: larger than {LARGEST >> 20} MiB")
        try:
            files[name] = path.read_text()
        except UnicodeDecodeError:
            raise TaskError(f"{path}: is no text") from None
    return files


def format_of(files: Mapping[str, str], device: str) -> Format:
    """Returns the format of a solution for ``device`` with ``files`` (text by path): ``plan`` if it has a plan.json or
    no file that is known, ``extension`` if its model_new.py imports the module ``cuda_extension``, ``triton`` if it
    imports ``triton`` and there is no GPU (only that format's interpreter can run it), and else ``python``."""
    entry = files.get(FORMATS["python"].entry)
    if FORMATS["plan"].entry in files or entry is None:
        return "plan"
    if re.search(r"^\s*(import|from)\s+cuda_extension\b", entry, re.M):
        return "extension"
    triton = re.search(r"^\s*(import|from)\b.*\btriton\b", entry, re.M)
    return "triton" if triton and device == "cpu" else "python"


def device_of(overrides: Sequence[str]) -> str:
    """Returns the device that the overrides name, else ``cuda`` on a machine with a GPU and ``cpu`` on others."""
    for word in overrides:
        if word.startswith("sandbox.device="):
            return word.partition("=")[2]
    found = subprocess.run([sys.executable, "-P", "-m", "cuda_agent.sandbox.driver"], capture_output=True, text=True)
    return "cuda" if '"architecture"' in found.stdout else "cpu"


def settings_for(
    files: Mapping[str, str], overrides: Sequence[str], format: Format | None, device: str | None
) -> tuple[Config, Path]:
    """Returns the configuration in which a solution with ``files`` is judged, and its cache folder on this machine.
    Without ``format`` or ``device``, and without an override of them, the format is that of the files, and the device
    is a GPU if there is one."""
    words = list(overrides)
    if device or not any(word.startswith(("sandbox.device=", "sandbox.servers=", "experiment=")) for word in words):
        words.append(f"sandbox.device={device or device_of(words)}")
    if format:
        words.append(f"sandbox.format={format}")
    config = compose(words)
    if not any(word.startswith("sandbox.format=") for word in words):
        found = format_of(files, config.sandbox.device)
        config = config.model_copy(update={"sandbox": config.sandbox.model_copy(update={"format": found})})
    return config, runs.cache_of(config)


def other_format(files: Mapping[str, str]) -> Format | None:
    """Returns the first format whose entry file is among ``files``, for the message about a missing entry file."""
    return next((name for name, known in FORMATS.items() if known.entry in files), None)


def checked_solution(files: Mapping[str, str], format: Format, where: str) -> Solution:
    """Returns the solution with ``files``, which come from ``where``.

    Raises:
        TaskError: The entry file of ``format`` (plan.json or model_new.py) is missing."""
    entry = FORMATS[format].entry
    if entry not in files:
        other = other_format(files)
        hint = f". It looks like format {other}" if other else ""
        raise TaskError(f"{where}: no {entry}; format {format} needs {entry} and kernels/{hint}")
    return Solution(format, dict(files))


def read_solution(folder: Path, format: Format) -> Solution:
    """Returns the solution of ``format`` in ``folder``.  Raises the errors of ``solution_files`` and
    ``checked_solution``."""
    return checked_solution(solution_files(folder), format, str(folder))


async def evaluate(
    settings: SandboxConfig, cache: Path, task: Task, solution: Solution, mode: Mode, again: bool, shapes: Sequence[str]
) -> tuple[Verdict, list[ShapeResult]]:
    """Judges ``solution`` for ``task``.  If the solution is correct, also checks it at other shapes.  Returns the
    verdict and one result for each of these shapes.  The results are empty if the verdict's status is not ``ok``.

    Args:
        mode: "quick", "strict" (more checks, more careful times) or "check" (no times).
        again: Whether to ignore cached verdicts and baselines.
        shapes: The other shapes, in the form that ``optimize.shapes.variants`` takes.

    Raises:
        TaskError: The task cannot be run.
        ConfigError: ``shapes`` is invalid, or ``again`` is set with remote servers."""
    from cuda_agent.sandbox.client import open_sandbox
    from cuda_agent.sandbox.remote import RemoteSandbox

    chosen = variants(task, shapes)
    async with open_sandbox(settings, cache) as sandbox:
        try:
            if not isinstance(sandbox, RemoteSandbox):
                verdict = await sandbox.evaluate(task, solution, mode, again)
            elif again:
                why = "servers (sandbox.servers) keep what they said; only this machine measures anew."
                raise ConfigError(f"--again: {why}")
            else:
                verdict = await sandbox.evaluate(task, solution, mode)
        except TaskError as error:
            raise TaskError(with_advice(printable(str(error)))) from None
        return verdict, await judge_shapes(sandbox, solution, chosen) if verdict.status == "ok" else []
