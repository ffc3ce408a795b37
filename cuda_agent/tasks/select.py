"""Selects tasks of a set by KernelBench's levels and by names."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from cuda_agent.errors import TaskError
from cuda_agent.tasks.task import Task


def level_of(task: Task) -> int | None:
    """Returns the task's level in KernelBench, or None if it has none."""
    found = re.fullmatch(r"level[-_]?(\d+)", task.family, re.I) or re.match(r"level[-_]?(\d+)/", task.name, re.I)
    return int(found[1]) if found else None


def is_kernelbench(tasks: Sequence[Task]) -> bool:
    return all(level_of(task) is not None or task.family == "kernelbench" for task in tasks)


def select(tasks: Sequence[Task], levels: Sequence[int] = (), only: Sequence[str] = ()) -> list[Task]:
    """Returns the tasks of KernelBench's ``levels`` (empty: of all) that fit one of the texts ``only`` (empty: all). A
    text is a task's name, such as ``level1/19_ReLU``, the last part of the name, KernelBench's number, such as ``19``,
    or a pattern for one of them, such as ``*ReLU*``.

    Raises:
        TaskError: There is no task of one of the levels, or none that fits one of the texts."""
    there = list(dict.fromkeys(level for task in tasks if (level := level_of(task)) is not None))
    if missing := [level for level in levels if level not in there]:
        known = f"only of {', '.join(map(str, there))}" if there else "of any"
        raise TaskError(f"there is no task of level {missing[0]}, {known}")
    names = {task.name: _names(task) for task in tasks if not levels or level_of(task) in levels}
    for text in only:
        if not any(fnmatchcase(name, text) for known in names.values() for name in known):
            close = get_close_matches(text, [name for known in names.values() for name in known], n=1)
            raise TaskError(f"there is no task {text}" + (f"; did you mean {close[0]}?" if close else ""))
    return [
        task
        for task in tasks
        if task.name in names
        and (not only or any(fnmatchcase(name, text) for name in names[task.name] for text in only))
    ]


def _names(task: Task) -> list[str]:
    last = task.name.rpartition("/")[2]
    number = last.partition("_")[0]
    return [task.name, last, *([number] if number.isdecimal() else [])]
