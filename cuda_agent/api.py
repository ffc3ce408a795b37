"""The Python API: judge a solution, or search for a fast one, in three lines.

    from cuda_agent.api import evaluate

    verdict = evaluate("model.py", "my-solution/")
    print(verdict.status, verdict.speedup_eager, verdict.speedup_compile)

``evaluate`` and ``optimize`` have an async form (``evaluate_async``). The plain forms also work inside a running event
loop, as in a notebook."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from cuda_agent.errors import TaskError
from cuda_agent.format_names import Format
from cuda_agent.optimize import evaluation, search
from cuda_agent.optimize.folder import SearchOrder, with_changes
from cuda_agent.sandbox.wire import Mode, Verdict
from cuda_agent.tasks.io import read_any
from cuda_agent.tasks.task import Task

Device = Literal["cpu", "cuda"]
P = ParamSpec("P")
Result = TypeVar("Result")


def load_task(source: str | Path, name: str | None = None) -> Task:
    """Returns a task.

    Args:
        source: A model.py, or a task set: a folder of KernelBench, a folder that synthesis wrote, or a parquet file.
        name: The task's name; needed if ``source`` has several tasks.

    Raises:
        TaskError: ``source`` cannot be read, is no task, or has no such task."""
    tasks = read_any(Path(source))
    chosen = tasks if name is None else [task for task in tasks if task.name == name]
    if len(chosen) != 1:
        names = ", ".join(task.name for task in tasks[:10])
        wanted = "one task" if name is None else f"a task {name}"
        raise TaskError(f"{source}: expected {wanted}, got {len(tasks)}: {names}")
    return chosen[0]


async def evaluate_async(
    task: Task | str | Path,
    solution: Mapping[str, str] | str | Path,
    *,
    mode: Mode = "quick",
    format: Format | None = None,
    device: Device | None = None,
    again: bool = False,
    overrides: Sequence[str] = (),
) -> Verdict:
    """Checks and times a solution in the sandbox, and returns the verdict.

    A solution that is wrong is no error: ``Verdict.status`` says so, and ``Verdict.message`` says why.

    Args:
        task: A task, or the path of a model.py with ``Model``, ``get_inputs`` and ``get_init_inputs``.
        solution: A folder, or the files as text by path, such as ``{"model_new.py": code}``.
        mode: "quick", "strict" (more checks, more careful times) or "check" (no times).
        format: The solution's format; by default that of its files.
        device: By default "cuda" on a machine with a GPU, else "cpu".
        again: Whether to ignore what was measured before.
        overrides: Hydra overrides of the configuration, as in ``["sandbox.threads=4"]``.

    Raises:
        TaskError: The task or the solution cannot be read, or the task cannot be run.
        ConfigError: An override is wrong.
        SandboxUnready: The sandbox cannot start, for example without a compiler."""
    given = task if isinstance(task, Task) else load_task(task)
    if isinstance(solution, Mapping):
        files, where = dict(solution), "the solution"
    else:
        files, where = evaluation.solution_files(Path(solution)), str(solution)
    config, cache = evaluation.settings_for(files, overrides, format, device)
    judged = evaluation.checked_solution(files, config.sandbox.format, where)
    verdict, _ = await evaluation.evaluate(config.sandbox, cache, given, judged, mode, again, ())
    return verdict


async def optimize_async(
    model_file: str | Path,
    *,
    base_url: str,
    model: str,
    output: str | Path | None = None,
    device: Device | None = None,
    overrides: Sequence[str] = (),
    watch: Callable[[dict[str, Any]], None] = lambda event: None,
    stop: asyncio.Event | None = None,
    **options: Any,
) -> search.SearchOutcome:
    """Makes a model faster with the help of a language model, and returns the outcome.

    Args:
        model_file: A model.py.
        base_url: The OpenAI-compatible address of the language model, including /v1. The API key comes from the
            environment.
        model: The language model's name at this address.
        output: The folder for the result; by default MODEL-optimized in the current folder.
        device: As in ``evaluate_async``.
        overrides: As in ``evaluate_async``.
        watch: Receives each event of the search, as the transcript has them.
        stop: An event that ends the search with the best solution so far.
        options: Fields of ``SearchOrder`` and of its ``Terms``, such as ``attempts=4``, ``minutes=30`` or
            ``target=2.0``.

    Raises:
        TaskError: The file cannot be read or run, or its outputs cannot be checked.
        OptimizeError: The address, an option or the folder cannot be used.
        SandboxUnready: The sandbox cannot start."""
    source = Path(model_file)
    changes = {"device": device or evaluation.device_of(overrides), **options}
    order = with_changes(SearchOrder(base_url, model), changes)
    config, cache = evaluation.settings_for({}, overrides, order.terms.format, order.terms.device)
    folder = Path(output) if output is not None else Path(f"{source.stem}-optimized")
    return await search.optimize(order, config.sandbox, cache, source, folder, False, watch, stop or asyncio.Event())


def _plain(work: Callable[P, Coroutine[Any, Any, Result]]) -> Callable[P, Result]:
    """Returns ``work`` as a plain function. It runs in the caller's thread or, if an event loop runs there already, in
    another one."""

    @functools.wraps(work)
    def plain(*arguments: P.args, **options: P.kwargs) -> Result:
        begun = work(*arguments, **options)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(begun)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, begun).result()

    plain.__name__ = plain.__qualname__ = work.__name__.removesuffix("_async")
    return plain


evaluate = _plain(evaluate_async)
optimize = _plain(optimize_async)
