"""Reads and writes task sets: folders with a file ``tasks.parquet``. Also reads KernelBench (a clone, or
its published data set) and parquet files of the data set CUDA-Agent-Ops-6K.

Task sets are local files. This module handles the Python code of tasks as text, and never executes it."""

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cuda_agent.errors import TaskError
from cuda_agent.spans import span
from cuda_agent.tasks.inspect import problems, recompute_ops
from cuda_agent.tasks.task import Task

FILE = "tasks.parquet"
PUBLISHED = ("ops", "data_source", "code")  # the columns of CUDA-Agent-Ops-6K, in its order
OWN = ("name", "family", "split")
KERNELBENCH = ("code", "level", "name", "problem_id")  # the columns of KernelBench's published data set
_TYPES: dict[str, Any] = {"ops": str | list, "level": int, "problem_id": int}  # of columns that are not text
_BLOCK = 1 << 26  # most bytes of one line of JSON


@span("write tasks")
def write_tasks(folder: Path, tasks: Sequence[Task]) -> None:
    """Writes ``tasks`` to ``folder/tasks.parquet``.

    Raises:
        TaskError: Two tasks share a name, or the file cannot be written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_names(tasks)
    text = pa.string()
    schema = pa.schema([("ops", pa.list_(text)), *((column, text) for column in (*PUBLISHED[1:], *OWN))])
    table = pa.Table.from_pylist([vars(task) for task in tasks], schema)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / f"{FILE}.{os.getpid()}.new"
        pq.write_table(table, written)
        os.replace(written, folder / FILE)
    except OSError as error:
        raise TaskError(f"{folder}: cannot be written: {error.strerror or error}") from None


def check_names(tasks: Sequence[Task]) -> None:
    """Raises TaskError if two tasks share a name."""
    if repeated := [name for name, count in Counter(task.name for task in tasks).items() if count > 1]:
        raise TaskError(f"task names are not unique: {', '.join(repeated[:5])}")


@span("read tasks")
def read_tasks(folder: Path) -> list[Task]:
    """Returns the tasks that ``write_tasks`` wrote to ``folder``, in the same order. ``folder`` may be the path of the
    parquet file itself.

    Raises:
        TaskError: The file is missing or is not a task set."""
    path = folder / FILE if folder.is_dir() else folder
    rows = _rows(path, required=(*PUBLISHED, *OWN))
    return [Task(**(row | {"ops": tuple(row["ops"])})) for row in rows]


def read_ops6k(path: Path) -> list[Task]:
    """Returns the tasks in a parquet file that has the columns of CUDA-Agent-Ops-6K. The ``ops`` of a task (names of
    the torch operators that it uses) are those in the file; they are not recomputed from the task's code.

    Raises:
        TaskError: The file cannot be read, or holds an invalid row."""
    rows = _rows(path, required=PUBLISHED)
    width = max(4, len(str(len(rows))))
    return [
        Task(f"ops6k-{n:0{width}d}", row["code"], _ops_list(row["ops"], path, n), row["data_source"], "ops6k")
        for n, row in enumerate(rows)
    ]


def _read_kernelbench(folder: Path) -> tuple[list[Task], list[TaskError]]:
    """Returns the tasks in a KernelBench folder, in KernelBench's order, and an error for each file that is not a task.

    Reads the ``*.py`` files in the sub-folders ``level1``, ``level2``, and so on, which may lie in a sub-folder
    ``KernelBench``, as in a clone of its repository. If there are no such sub-folders, reads the ``*.py`` files in
    ``folder``. A task's name is its file's name without ``.py``. For a file in a sub-folder, the name starts with the
    level, as in ``level1/19_ReLU``. A task's ``family`` (its origin) is its level, such as ``level1``, or
    ``kernelbench`` if the file is in no level's folder. Its ``split`` is ``heldout``: it serves for evaluation, not for
    training. Raises TaskError if there is no ``*.py`` file."""
    levels = _levels_in(folder) or (_levels_in(folder / "KernelBench") if (folder / "KernelBench").is_dir() else [])
    found, refused = list[Task](), list[TaskError]()
    for place in levels or [folder]:
        family = place.name if levels or re.fullmatch(r"level\d+", place.name) else "kernelbench"
        for path in sorted(place.glob("*.py"), key=natural):
            if path.name == "__init__.py":
                continue
            try:
                task = task_from_file(path)
            except TaskError as error:
                refused.append(error)
                continue
            name = f"{place.name}/{task.name}" if levels else task.name
            found.append(replace(task, name=name, family=family, split="heldout"))
    if not found and not refused:
        raise TaskError(f"{folder}: no task files (*.py) there or in its level folders")
    return found, refused


def _levels_in(folder: Path) -> list[Path]:
    return sorted((p for p in folder.iterdir() if p.is_dir() and re.fullmatch(r"level\d+", p.name)), key=natural)


def _read_kernelbench_table(path: Path) -> tuple[list[Task], list[TaskError]]:
    """Returns the tasks in a table with the columns of KernelBench's published data set, in the order of levels and
    numbers, and an error for each row that is not a task. The tasks are those that a clone with the same files has."""
    found, refused = list[Task](), list[TaskError]()
    for row in sorted(_rows(path, required=KERNELBENCH), key=lambda row: (row["level"], row["problem_id"])):
        family = f"level{row['level']}"
        try:
            task = _checked(row["name"], row["code"], f"{path}: {row['name']}")
        except TaskError as error:
            refused.append(error)
            continue
        found.append(replace(task, name=f"{family}/{task.name}", family=family, split="heldout"))
    return found, refused


def task_from_file(path: Path) -> Task:
    """Returns the task in the Python file ``path``.

    Raises:
        TaskError: The file cannot be read or is not a task."""
    try:
        code = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read: {error}") from None
    return _checked(path.stem, code, str(path))


def _checked(name: str, code: str, where: str) -> Task:
    """Returns the task with this source, which comes from ``where``. Raises TaskError if ``code`` is not a task."""
    if found := problems(code):
        raise TaskError(f"{where}: not a task: {'; '.join(found)}")
    ops = recompute_ops(code)
    return Task(name=name, code=code, ops=ops, data_source=f"torch#{len(ops)}", family="file")


def read_any(source: Path) -> list[Task]:
    """Returns the tasks in ``source``: a folder that ``write_tasks`` wrote, KernelBench (a clone, a folder of levels or
    of one level, or tables of its data set), a parquet file, a file of JSON lines or a ``*.py`` file.

    Raises:
        TaskError: ``source`` cannot be read, or one of its files or rows is not a task."""
    found, refused = _found_in(source)
    if refused:
        raise refused[0]
    return found


def _found_in(source: Path) -> tuple[list[Task], list[TaskError]]:
    """Returns the tasks in ``source`` (see ``read_any``), and an error for each file or row that is not a task."""
    if not source.exists():
        raise TaskError(f"{source}: no such file or folder")
    if source.is_dir():
        if not (tables := _tables_in(source)):
            return _read_kernelbench(source)
        parts = [_found_in(table) for table in tables]
        return [task for found, _ in parts for task in found], [error for _, refused in parts for error in refused]
    if source.suffix == ".py":
        return [task_from_file(source)], []
    columns = set(_columns(source))
    if set(KERNELBENCH) <= columns and not set(OWN) <= columns:
        return _read_kernelbench_table(source)
    return read_tasks(source) if set(OWN) <= columns else read_ops6k(source), []


def _tables_in(folder: Path) -> list[Path]:
    """Returns the tables in a folder: its task set, its only table, or all tables of KernelBench's data set. They may
    lie in a sub-folder ``data``, as they are published."""
    if (folder / FILE).is_file():
        return [folder / FILE]
    for place in (folder, folder / "data"):
        tables = sorted((path for path in place.glob("*") if path.suffix in (".parquet", ".jsonl")), key=natural)
        if len(tables) == 1 or (tables and all(set(KERNELBENCH) <= set(_columns(table)) for table in tables)):
            return tables
    return []


@dataclass(frozen=True)
class Imported:
    tasks: list[Task]  # the kept tasks
    dropped: list[str]  # files or rows that are not tasks, with their errors
    copies: int  # number of dropped tasks that are byte-identical to a kept one


def import_tasks(source: Path, folder: Path) -> Imported:
    """Reads the tasks in ``source`` and writes them to ``folder`` as a task set. ``source`` may have any form that
    ``read_any`` accepts. Recomputes each task's ``ops`` (the torch operators that it uses) from its code. Leaves out
    tasks with the same code as an earlier task, and files and rows that are not tasks. Returns the written tasks, an
    error for each file or row that is not a task, and the number of duplicates.

    Raises:
        TaskError: ``source`` cannot be read or holds no task, or ``folder`` cannot be written."""
    found, refused = _found_in(source)
    dropped = [str(error) for error in refused]
    tasks: dict[str, Task] = {}
    for task in found:
        if wrong := problems(task.code):
            dropped.append(f"{task.name}: not a task: {'; '.join(wrong)}")
        elif task.digest not in tasks:
            tasks[task.digest] = replace(task, ops=recompute_ops(task.code))
    if not tasks:
        first = f" ({dropped[0]})" if dropped else ""
        raise TaskError(f"{source}: holds no task with Model, get_inputs and get_init_inputs{first}")
    write_tasks(folder, list(tasks.values()))
    return Imported(list(tasks.values()), dropped, len(found) + len(refused) - len(tasks) - len(dropped))


def _columns(path: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(_json_lines(path).column_names if path.suffix == ".jsonl" else pq.read_schema(path).names)
    except FileNotFoundError:
        raise TaskError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError) as error:
        kind = "a file of JSON lines" if path.suffix == ".jsonl" else "a parquet file"
        raise TaskError(f"{path}: not {kind}: {str(error).splitlines()[0]}") from None


def _json_lines(path: Path) -> Any:
    from pyarrow import json as lines

    return lines.read_json(path, lines.ReadOptions(block_size=_BLOCK))


def _rows(path: Path, required: Sequence[str]) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    there = _columns(path)
    if missing := [column for column in required if column not in there]:
        raise TaskError(f"{path}: no column {', '.join(missing)}; it has {', '.join(there) or 'none'}")
    try:
        json_lines = path.suffix == ".jsonl"
        table = _json_lines(path).select(required) if json_lines else pq.read_table(path, columns=list(required))
        rows = table.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise TaskError(f"{path}: damaged: {str(error).splitlines()[0]}") from None
    for number, row in enumerate(rows):
        for name in required:
            if not isinstance(row[name], _TYPES.get(name, str)):
                wanted = "number" if _TYPES.get(name) is int else "text"
                raise TaskError(f"{path}: row {number}: {name} holds no {wanted}")
    return rows


def _ops_list(value: Any, path: Path, row: int) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            value = [value] if value and value[0] not in "[{" else None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TaskError(f"{path}: row {row}: ops is neither a list of names nor a JSON list")
    return tuple(value)


def natural(path: Path | str) -> list[Any]:
    """Returns a key that sorts paths by file name, with numbers compared by value: ``2_b`` comes before ``10_a``."""
    parts = re.split(r"(\d+)", Path(path).name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
