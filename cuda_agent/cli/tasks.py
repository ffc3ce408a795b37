"""The commands ``cuda-agent tasks``, which show, import and check task sets."""

import difflib
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from cuda_agent.cli.options import (
    STORE,
    AsJson,
    Overrides,
    StoreOption,
    command,
    command_group,
    composed,
    print_json,
    show,
)
from cuda_agent.cli.places import open_existing
from cuda_agent.errors import ConfigError, TaskError

tasks_app = command_group("Show, import and check task sets.")
MOST_DROPPED = 10  # dropped items of an import that are listed


@command(
    tasks_app, "cuda-agent tasks show KernelBench/", "cuda-agent tasks show tasks.parquet relu_sum-0003", name="show"
)
def tasks_show(
    source: Annotated[Path, Argument(help="a task set, an Ops-6K parquet, a KernelBench folder, or one model.py")],
    name: Annotated[str | None, Argument(help="name of the task whose code is printed [default: list all]")] = None,
    as_json: AsJson = False,
) -> None:
    """List the tasks of a set, or print the code of one."""
    from cuda_agent.tasks.io import read_any

    tasks = read_any(source)
    if name is not None:
        chosen = next((task for task in tasks if task.name == name), None)
        if chosen is None:
            close = difflib.get_close_matches(name, [task.name for task in tasks], n=1)
            raise TaskError(f"{source}: no task {name}." + (f" Did you mean {close[0]}?" if close else ""))
        print_json(asdict(chosen)) if as_json else print(chosen.code)
    elif as_json:
        print_json([asdict(task) for task in tasks])
    else:
        for task in tasks:
            print(f"{task.name:32} {task.split:8} {task.family:10} {task.data_source:14} {', '.join(task.ops)}")
        print(f"{len(tasks)} tasks")


@command(
    tasks_app,
    "cuda-agent tasks import cuda_agent_ops_6k.parquet my-tasks/",
    "cuda-agent tasks import last my-tasks/",
    name="import",
)
def tasks_import(
    source: Annotated[Path, Argument(help="an Ops-6K parquet, a KernelBench folder, one model.py, or a run's name")],
    folder: Annotated[Path, Argument(help="folder for the new task set")],
    store: StoreOption = STORE,
    as_json: AsJson = False,
) -> None:
    """Import tasks into a task set.

    Drop invalid files and duplicates. Find each task's operators in its code, and ignore any list of operators in the
    source. A source that is no file and no path is a run of --store, or `last`; its tasks keep their split."""
    from cuda_agent.pipeline import runs
    from cuda_agent.tasks.io import import_tasks

    with tempfile.TemporaryDirectory() as held:
        if not source.exists() and len(source.parts) == 1:
            try:
                opened = open_existing(store)
                run = runs.find_run(opened, str(source))
            except ConfigError as error:
                raise TaskError(f"{source}: no such file or folder, and no run: {error}") from None
            imported = import_tasks(runs.fetch_output(opened, run, "synthesis", "tasks", Path(held) / "tasks"), folder)
        else:
            imported = import_tasks(source, folder)
    count, dropped = len(imported.tasks), imported.dropped
    if as_json:
        print_json({"tasks": count, "folder": str(folder), "dropped": dropped, "copies": imported.copies})
        return
    print(f"{count} tasks in {folder / 'tasks.parquet'}")
    if imported.copies:
        print(f"dropped as copies: {imported.copies}")
    if dropped:
        print(f"dropped as no task: {len(dropped)}")
        print("\n".join(f"  {line}" for line in dropped[:MOST_DROPPED]))
    if len(dropped) > MOST_DROPPED:
        print(f"  and {len(dropped) - MOST_DROPPED} more: see --json")


@command(
    tasks_app, "cuda-agent tasks lint KernelBench/level1", "cuda-agent tasks lint my-tasks/ --csv lint.csv", name="lint"
)
def tasks_lint(
    source: Annotated[Path, Argument(help="a task set, an Ops-6K parquet, a KernelBench folder, or one model.py")],
    overrides: Overrides = None,
    table: Annotated[
        Path | None, Option("--csv", help="CSV file to write: a row for each task and wrong answer")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find tasks that accept wrong answers.

    Try wrong answers on each task of a set, such as a constant, a copy of an input, or a result that ignores inputs
    or weights. Print the wrong answers that each task accepts. Exit code 1: a task accepts a wrong answer, or does
    not run. Overrides change settings of the sandbox, as in sandbox.tolerance=1e-4 sandbox.run_seconds=60."""
    from cuda_agent.optimize.evaluation import run_to_end
    from cuda_agent.sandbox.client import open_sandbox
    from cuda_agent.synthesis import lint
    from cuda_agent.tasks.io import read_any

    settings, cache = composed(overrides)
    tasks = read_any(source)

    async def probe_all() -> Any:
        async with open_sandbox(settings.sandbox, cache) as sandbox:
            return await lint.lint(tasks, sandbox, lambda line: print(line, file=sys.stderr))

    probes = run_to_end(probe_all())
    if table:
        lint.write_csv(table, probes)
    show(as_json, lint.to_json(probes), lint.lint_lines(probes, settings.sandbox.tolerance))
    sys.exit(int(any(probe.error or probe.lets_through for probe in probes.values())))
