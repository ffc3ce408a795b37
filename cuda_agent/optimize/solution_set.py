"""Reads a set of finished solutions from JSON, JSON lines or a folder, such as a run of KernelBench.

Every record of the input becomes one ``SolutionRecord``.  It has a task, or the reason why it cannot be judged.
Files are read as text; nothing is imported or run."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cuda_agent.errors import TaskError
from cuda_agent.format_names import Format
from cuda_agent.optimize.evaluation import LARGEST, other_format, read_solution
from cuda_agent.sandbox.formats.table import FORMATS
from cuda_agent.sandbox.wire import Solution
from cuda_agent.tasks.inspect import problems, recompute_ops
from cuda_agent.tasks.io import natural
from cuda_agent.tasks.select import level_of
from cuda_agent.tasks.task import Task

# The fields of a JSON record -> the names that published sets give them, the preferred name first.
FIELDS = {
    "code": ("custom_code", "kernel_code", "generated_code", "solution", "kernel", "code"),
    "files": ("files",),  # path -> text: a solution of several files
    "reference": ("ref_code", "reference_code", "reference", "ref_arch_src", "task_code"),
    "level": ("level_id", "level"),
    "number": ("problem_id", "task_id"),
    "name": ("task", "task_name", "problem_name", "name"),
    "sample": ("sample_id", "sample"),
    "claim_eager": ("claimed_speedup", "speedup", "speedup_eager", "score_default"),
    "claim_compile": ("claimed_speedup_compile", "speedup_compile", "score_torch_compile_default"),
}
_NOTHING = ("", "none", "null")  # text of a record without a solution
_RUN = re.compile(r"level_(\d+)_problem_(\d+)_sample_(\d+)")  # a file of KernelBench's runs/NAME
_LEVEL = re.compile(r"level[-_]?(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"(?:problem[-_]?)?(\d+)(?:[-_].*)?")
_SUFFIX = re.compile(r"([-_]sample[-_]?\d+)?([-_]kernel)?$")


@dataclass(frozen=True)
class SolutionRecord:
    """One record of the input.  If the record cannot be judged, ``why`` is the reason, a key of the table of outcomes
    ``pages.judged_set.OUTCOMES``, and ``message`` gives details.  Otherwise ``why`` is empty.  ``claim_eager`` and
    ``claim_compile`` are speed-ups that the author claims."""

    name: str
    solution: Solution | None = None
    task: Task | None = None
    why: str = ""
    message: str = ""
    claim_eager: float | None = None
    claim_compile: float | None = None
    other_reference: bool = False  # the record was written for another version of its task


@dataclass(frozen=True)
class SolutionSet:
    name: str
    records: list[SolutionRecord]
    tasks: list[Task]  # all tasks of the set, with or without a solution
    skipped: list[str] = field(default_factory=list)  # files of a folder that hold no solution


@dataclass(frozen=True)
class _Place:
    """The facts in a record that identify its task: the ``parts`` of the task's name or path, and the ``level`` and
    ``number`` in KernelBench (None: not known)."""

    parts: tuple[str, ...] = ()
    level: int | None = None
    number: int | None = None


@dataclass(frozen=True)
class _Found:
    """A record whose task is not known yet.  ``place`` and ``reference`` (the task's source, or "") identify the
    task."""

    record: SolutionRecord
    place: _Place = _Place()
    reference: str = ""


def read_set(source: Path, tasks: Sequence[Task] | None, format: Format) -> SolutionSet:
    """Returns the set of solutions in ``source``, with the records in the order of ``source``.

    Args:
        source: A folder, a file of JSON lines, or a JSON file.  The JSON file holds a list of records, an object that
            maps each level to such a list, or a single record.
        tasks: The tasks that the records may solve.  None: each record holds the source of its task.
        format: The solution format of all records.

    Raises:
        TaskError: ``source`` cannot be read or holds no record."""
    if not source.exists():
        raise TaskError(f"{source}: no such file or folder")
    skipped: list[str] = []
    if source.is_dir():
        found = list(_of_folder(source, format, skipped))
    else:
        rows = list(_json_records(source))
        if rows and all(isinstance(item, Exception) for _, item in rows):
            raise TaskError(f"{source}: neither JSON nor JSON lines: {rows[0][0]}: {rows[0][1]}")
        found = [_of_json(name, item, format) for name, item in rows]
    if not found:
        wanted = FORMATS[format].entry
        raise TaskError(f"{source}: holds no solution: no JSON record, no *.py file and no folder with {wanted}")
    lookup = _Own() if tasks is None else _Index(tasks)
    records = [lookup.matched(one) for one in _with_unique_names(found)]
    name = source.resolve().name if source.is_dir() else source.stem
    return SolutionSet(name, records, list(lookup.tasks.values()), skipped)


# Records of a JSON file -----------------------------------------------------------------------------------------------


def _json_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of each record.  If a line is not JSON, its value is the exception from the parser."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from None
    whole = _parsed(data)
    if isinstance(whole, Exception):
        for number, line in enumerate(data.splitlines(), 1):
            if line.strip():
                yield f"line {number}", _parsed(line)
    elif isinstance(whole, dict) and whole and all(isinstance(value, list) for value in whole.values()):
        for level, rows in whole.items():
            for number, row in enumerate(rows, 1):
                yield f"{level}/{number}", {"level": level} | row if isinstance(row, dict) else row
    else:
        for number, row in enumerate(whole if isinstance(whole, list) else [whole], 1):
            yield f"record {number}", row


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        return error


def _of_json(name: str, row: Any, format: Format) -> _Found:
    if isinstance(row, Exception):
        return _Found(SolutionRecord(name, why="unreadable", message=f"no JSON: {row}"))
    if not isinstance(row, dict):
        return _Found(SolutionRecord(name, why="unreadable", message=f"a {type(row).__name__}, expected an object"))

    def known(key: str) -> Any:
        return next((row[alias] for alias in FIELDS[key] if row.get(alias) is not None), None)

    level, number, task = _digits(known("level")), known("number"), known("name")
    if not isinstance(number, int) and _digits(number) is None:  # a name in the place of a number
        number, task = None, task or number
    parts = tuple(part for part in str(task or "").removesuffix(".py").split("/") if part)
    own = _place(parts)
    place = _Place(own.parts, own.level if level is None else level, own.number if number is None else _digits(number))
    files, code = known("files"), known("code")
    if files is None and isinstance(code, str) and code.strip().lower() not in _NOTHING:
        files = {"model_new.py": code}
    label = "/".join(parts) or "/".join(
        f"{what}{value}" for what, value in (("level", place.level), ("", place.number)) if value is not None
    )
    if (sample := known("sample")) is not None:
        label = f"{label or name}, sample {sample}"
    record = SolutionRecord(
        label or name, claim_eager=_claim(known("claim_eager")), claim_compile=_claim(known("claim_compile"))
    )
    reference = known("reference")
    return _Found(_with_files(record, files, format), place, reference if isinstance(reference, str) else "")


def _with_files(record: SolutionRecord, files: Any, format: Format) -> SolutionRecord:
    """Returns ``record`` with ``files`` as its solution.  If the files are not valid, ``why`` and ``message`` say
    so."""
    if not files:
        return replace(record, why="no_solution", message="the record holds no code")
    if not isinstance(files, dict) or not all(isinstance(text, str) for item in files.items() for text in item):
        return replace(record, why="unreadable", message="the files are no texts by path")
    if FORMATS[format].entry not in files:
        fitting = other_format(files)
        hint = f"; sandbox.format={fitting} judges {FORMATS[fitting].entry}" if fitting else ""
        message = f"no {FORMATS[format].entry}, as format {format} needs it{hint}"
        return replace(record, why="unreadable", message=message)
    for path, text in files.items():
        try:
            size = len(f"{path}{text}".encode())
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
            return replace(record, why="unreadable", message="a file is no Unicode text")
        if size > LARGEST:
            return replace(record, why="unreadable", message=f"{path}: larger than {LARGEST >> 20} MiB")
    return replace(record, solution=Solution(format, files))


def _digits(value: Any) -> int | None:
    """Returns the integer that ``value`` stands for: 3 for 3, "3" and "level3".  Returns None for other values."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = re.fullmatch(r"(?:level[-_ ]?)?(\d{1,9})", value.strip(), re.IGNORECASE) if isinstance(value, str) else None
    return int(found[1]) if found else None


def _claim(value: Any) -> float | None:
    try:
        claim = float(str(value).rstrip("x×"))
    except ValueError:
        return None
    return claim if math.isfinite(claim) and claim > 0 else None


# Solutions of a folder ------------------------------------------------------------------------------------------------


def _of_folder(source: Path, format: Format, skipped: list[str]) -> Iterator[_Found]:
    """Yields a record for each folder with the format's entry file.  Outside of such folders, yields a record for each
    Python file except ``__init__.py``, and adds all other files to ``skipped``."""

    def unreadable(error: OSError) -> None:
        raise TaskError(f"{error.filename}: cannot be read: {error.strerror}")

    for where, folders, files in os.walk(source, onerror=unreadable):
        here = Path(where)
        folders[:] = sorted((name for name in folders if not name.startswith((".", "__"))), key=natural)
        parts = here.relative_to(source).parts
        if FORMATS[format].entry in files:
            folders.clear()
            yield _of_path(here, parts or (source.resolve().name,), format)
            continue
        for name in (name for name in folders if (here / name).is_symlink()):  # os.walk does not enter these
            yield _of_path(here / name, (*parts, name), format)
        for name in sorted(files, key=natural):
            if name.endswith(".py") and name != "__init__.py":
                yield _of_path(here / name, (*parts, name.removesuffix(".py")), format)
            else:
                skipped.append("/".join((*parts, name)))


def _of_path(path: Path, parts: tuple[str, ...], format: Format) -> _Found:
    record = SolutionRecord("/".join(parts))
    if any(part.is_symlink() for part in (path, *(path.rglob("*") if path.is_dir() else ()))):
        return _Found(replace(record, why="unreadable", message="holds a symbolic link"), _place(parts))
    try:
        if path.is_dir():
            files: dict[str, str] = read_solution(path, format).files
        else:
            too_large = path.stat().st_size > LARGEST
            files = {"model_new.py": "x" * (LARGEST + 1) if too_large else path.read_text(encoding="utf-8")}
            if files["model_new.py"].strip().lower() in _NOTHING:
                files = {}
    except (OSError, UnicodeDecodeError, TaskError) as error:
        return _Found(replace(record, why="unreadable", message=str(error)), _place(parts))
    return _Found(_with_files(record, files, format), _place(parts))


def _place(parts: tuple[str, ...]) -> _Place:
    """Finds level and number in a path: ("level1", "3_relu") has level 1 and number 3; ("3_relu",) only number 3."""
    if run := next((found for part in parts if (found := _RUN.search(part))), None):
        return _Place(parts, int(run[1]), int(run[2]))
    level = next((found for part in parts if (found := _LEVEL.fullmatch(part))), None)
    rest = parts[parts.index(level[0]) + 1 :] if level else parts
    number = _NUMBER.fullmatch(rest[0]) if rest else None
    return _Place(parts, int(level[1]) if level else None, int(number[1]) if number else None)


# Tasks of the records -------------------------------------------------------------------------------------------------


def _with_unique_names(found: Sequence[_Found]) -> list[_Found]:
    count: Counter[str] = Counter()
    unique = []
    for one in found:
        name = one.record.name
        count[name] += 1
        if count[name] > 1:
            one = replace(one, record=replace(one.record, name=f"{name} ({count[name]})"))
        unique.append(one)
    return unique


class _Index:
    """Finds a record's task among given tasks: by the task's name, by the last part of the name if no other task shares
    this part, or by KernelBench's level and number."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = {task.name: task for task in tasks}
        self._names = _unique((task.name.rpartition("/")[2], task) for task in tasks)
        self._names |= self.tasks
        numbers = [(int(found[1]), task) for task in tasks if (found := _NUMBER.fullmatch(task.name.split("/")[-1]))]
        self._numbers: dict[Any, Task] = _unique(((level_of(task), number), task) for number, task in numbers)
        self._alone = _unique(numbers)

    def matched(self, found: _Found) -> SolutionRecord:
        record, place = found.record, found.place
        task = self._by_name(place)
        if task is None and place.number is not None:
            by_level = self._numbers.get((place.level, place.number))
            task = by_level or (self._alone.get(place.number) if place.level is None else None)
        other = bool(found.reference) and task is not None and found.reference.strip() != task.code.strip()
        record = replace(record, task=task, other_reference=other)
        if task is None and not record.why:
            return replace(record, why="no_task", message=f"no task of the set fits {_said(place)}")
        return record

    def _by_name(self, place: _Place) -> Task | None:
        """Returns the task whose name, or last part of the name, consists of consecutive ``place.parts``, joined by
        "/".  Ignores an ending such as "_sample_0" or "_kernel" of the last part.  Prefers the longest match.  Skips
        tasks whose level is known to differ from ``place.level``.  Returns None if no task fits."""
        parts = (*place.parts[:-1], _SUFFIX.sub("", place.parts[-1])) if place.parts else ()
        for length in range(len(parts), 0, -1):
            for start in range(len(parts) - length + 1):
                task = self._names.get("/".join(parts[start : start + length]))
                if task and (place.level is None or level_of(task) in (None, place.level)):
                    return task
        return None


class _Own:
    """Makes a record's task from the task source in the record.  Records with the same source share one task."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}  # by digest
        self._names: set[str] = set()

    def matched(self, found: _Found) -> SolutionRecord:
        record, place, wrong = found.record, found.place, ""
        if not found.reference:
            wrong = "the record brings no reference: name the tasks with --tasks"
        elif mistakes := problems(found.reference):
            wrong = f"its reference: {'; '.join(mistakes)}"
        if wrong:
            return record if record.why else replace(record, why="no_task", message=wrong)
        family = "file" if place.level is None else f"level{place.level}"
        name = "/".join(place.parts) or (record.name if place.number is None else f"{family}/{place.number}")
        ops = recompute_ops(found.reference)
        task = Task(name, found.reference, ops, f"torch#{len(ops)}", family, "heldout")
        if task.digest not in self.tasks:
            self.tasks[task.digest] = replace(task, name=f"{name} {task.digest[:6]}") if name in self._names else task
            self._names.add(name)
        return replace(record, task=self.tasks[task.digest])


def _unique(pairs: Any) -> dict[Any, Task]:
    """Returns a dictionary from ``pairs`` of key and task.  A key that occurs in several pairs is left out."""
    pairs = list(pairs)
    count = Counter(key for key, _ in pairs)
    return {key: task for key, task in pairs if count[key] == 1}


def _said(place: _Place) -> str:
    known: Mapping[str, Any] = {"level": place.level, "number": place.number}
    numbers = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
    return " or ".join(filter(None, ["/".join(place.parts), numbers])) or "it: the record names none"
