"""Runs ``cuda-agent optimize --whole``: makes a model of several layers faster, part by part.

It traces the model in the sandbox, searches a solution for each part that has a notable share of the time, and puts the
solutions into the model.  Strict verdicts on the whole model decide which of them stay: a kernel that is faster alone
may be slower in the model.  Not covered: kernels that span several submodules; these need a search without --whole."""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_agent.config import SandboxConfig
from cuda_agent.errors import TaskError
from cuda_agent.optimize import search
from cuda_agent.optimize.export import model_new
from cuda_agent.optimize.folder import OptimizeError, SearchOrder, write_solution
from cuda_agent.optimize.search import Watch
from cuda_agent.optimize.whole.folder import Spent, opened, order_for, part_folder, read_search
from cuda_agent.optimize.whole.join import joined
from cuda_agent.optimize.whole.parts import Part, parts_of
from cuda_agent.optimize.whole.report import PartResult, WholeOutcome, part_lines
from cuda_agent.optimize.whole.tasks import task_of, trace_of
from cuda_agent.pages.charts import duration
from cuda_agent.pages.whole import render
from cuda_agent.policy.served import ServedModelError
from cuda_agent.sandbox.client import open_sandbox
from cuda_agent.sandbox.formats.solution_format import SolutionError
from cuda_agent.sandbox.wire import Solution, Verdict, printable
from cuda_agent.tasks.io import task_from_file
from cuda_agent.tasks.task import Task
from cuda_agent.tracking import write_whole

_PAYS = 1.01  # a solution stays if it makes the model so many times as fast; less is within the noise
_COMPILED = ", and torch.compile for the rest"
Show = Callable[[dict[str, Any], Sequence[str]], None]
"""Shows an event: as JSON, or as lines for a person."""
Judge = Callable[[Sequence[PartResult]], Awaitable[Verdict | None]]


@dataclass(frozen=True)
class Command:
    """What a person asked for, and how to reach the person."""

    order: SearchOrder
    settings: SandboxConfig
    cache: Path
    folder: Path  #: of the result
    show: Show  #: shows the events of the whole command
    watching: Callable[[str], AbstractContextManager[Watch]]  #: yields a function for the events of a part's search
    stop: asyncio.Event  #: set by a person; the searches then end, and what was found is judged


async def optimize_whole(command: Command, source: Path, resume: bool) -> WholeOutcome:
    """Makes the model in the file ``source`` faster part by part, and writes the result into the command's folder.
    With ``resume``, this folder holds searches to continue.

    Raises:
        TaskError: The model cannot be read or run.
        SandboxUnready: The sandbox cannot start.
        OptimizeError: The model has no parts, or the settings or the folder cannot be used.
        ServedModelError: The language model's server does not answer, and nothing has been found yet.
        KeyboardInterrupt: A person stopped the command before anything was found."""
    search.check_order(command.order)
    task, order, settings, folder = task_from_file(source), command.order, command.settings, command.folder
    with opened(order, settings, task, folder, resume):
        async with open_sandbox(settings, command.cache) as sandbox:
            parts = await _looked_at(task, command, sandbox)
        event = {"kind": "parts", "parts": [PartResult(part).to_json() for part in parts]}
        command.show(event, part_lines(parts))
        results, why = await _search_all(parts, task, command)
        command.stop.clear()
        verdict, compiled = None, False
        if any(result.solution for result in results):
            async with open_sandbox(settings, command.cache) as sandbox:
                verdict, compiled = await _put_together(results, task, command, sandbox)
        spent = sum((read_search(part_folder(folder, part), order).spent for part in parts), Spent())
        rows = [result.to_json() for result in results]
        write_whole(folder / "parts.json", json.dumps(rows, indent=1))
        where = f"{order.model} at {order.base_url}"
        page = render(task.name, task.code, rows, verdict, compiled, str(order.terms.goal), where)
        write_whole(folder / "report.html", page)
        return WholeOutcome(folder, results, verdict, compiled, why, order.terms.goal, spent)


async def _looked_at(task: Task, command: Command, sandbox: Any) -> list[Part]:
    """Checks the model, and returns its parts: those of the trace in ``folder``, or of a new trace."""
    file, settings, stop, show = command.folder / "trace.json", command.settings, command.stop, command.show
    if file.is_file():
        try:
            return parts_of(json.loads(file.read_text()))
        except (ValueError, TaskError):
            raise OptimizeError(f"{file}: no trace to go on with; begin anew in another folder") from None
    text = "checking the model, then timing eager PyTorch, torch.compile and the submodules"
    show({"kind": "note", "text": text}, [f"{task.name}: {text}"])
    probe = await _or_interrupt(stop, search.checked(task, sandbox), sandbox)
    trace = await _or_interrupt(stop, trace_of(task, sandbox, settings.device, settings.train_mode), sandbox)
    parts = parts_of(trace)
    if sum(len(part.names) for part in parts) < 2:
        found = ", ".join(part.title for part in parts) or "none"
        raise OptimizeError(
            f"{task.name} has no parts to optimize apart from each other (submodules that are called once, with "
            f"tensors: {found}): leave out --whole"
        )
    write_whole(file, json.dumps(trace))
    times = {"eager": probe.eager_seconds, "torch.compile": probe.compile_seconds}
    said = ", ".join(f"{name} {duration(seconds)}" for name, seconds in times.items() if seconds)
    show({"kind": "baselines", "probe": probe.to_json()}, [f"baselines: {said}", ""])
    return parts


async def _or_interrupt(stop: asyncio.Event, work: Coroutine[Any, Any, Any], sandbox: Any) -> Any:
    """Returns the result of ``work``.  Raises KeyboardInterrupt if ``stop`` is set first."""
    result = await search.unless(stop, work, sandbox)
    if result is None:
        raise KeyboardInterrupt
    return result


async def _search_all(parts: Sequence[Part], task: Task, command: Command) -> tuple[list[PartResult], str]:
    """Searches a solution for each part that has a notable share of the time.  Returns a result for each of ``parts``,
    and the reason why the last search ended."""
    order, folder = command.order, command.folder
    results = [PartResult(part, part.left_out) for part in parts]
    wanted = [result for result in results if not result.note]
    errors: list[Exception] = []
    why = ""
    for number, result in enumerate(wanted):
        place = part_folder(folder, result.part)
        spent = sum((read_search(part_folder(folder, one.part), order).spent for one in wanted), Spent())
        known = read_search(place, order)
        own = order_for(order, [one.part for one in wanted[number:]], spent, known.spent)
        if why in ("stopped", "server"):
            result.note = "not searched"
        elif own is None and not known.done:
            result.note = "no budget is left"
        elif own is not None and not known.done:
            try:
                why = await _search(result.part, f"part {number + 1} of {len(wanted)}", own, task, command, known.begun)
            except KeyboardInterrupt:
                if not any(one.solution for one in wanted):
                    raise
                why, result.note = "stopped", "not searched"
            except (TaskError, OptimizeError, ServedModelError) as error:
                why = "server" if isinstance(error, ServedModelError) else why
                errors.append(error)
                result.note = printable(str(error))
                event = {"kind": "note", "part": result.part.module.name, "text": result.note}
                command.show(event, [f"left out: {result.note}"])
        known = read_search(place, order)
        if known.solution and known.verdict and known.verdict.status == "ok":
            slow = (known.verdict.speedup_eager or 0.0) <= 1.0
            result.isolated, result.note = known.verdict, "no faster than eager PyTorch" if slow else ""
            result.solution = None if slow else known.solution
        elif known.begun:
            result.note = result.note or "no solution was found"
    if errors and not any(read_search(part_folder(folder, one.part), order).begun for one in wanted):
        raise errors[0]
    return results, why


async def _search(part: Part, place: str, order: SearchOrder, task: Task, command: Command, resume: bool) -> str:
    """Searches a solution for ``part``, and returns why the search ended.  ``place`` is its number, in words."""
    name, folder = part.module.name, part_folder(command.folder, part)
    event = {"kind": "part", "part": name, "share": part.share, "bound": part.bound}
    command.show(event, ["", f"{place}: {part.title}, {part.share:.0%} of the time"])
    source = folder.with_name(f"{folder.name}.py")
    source.parent.mkdir(exist_ok=True)
    source.write_text(task_of(part, task.code))
    with command.watching(name) as watch:
        outcome = await search.optimize(
            order, command.settings, command.cache, source, folder, resume, watch, command.stop
        )
    return outcome.why


async def _put_together(
    results: Sequence[PartResult], task: Task, command: Command, sandbox: Any
) -> tuple[Verdict | None, bool]:
    """Judges the model with the solutions in it, keeps the fastest set, with or without torch.compile for the rest of
    the model, and writes it to the command's folder.  Returns its strict verdict, or None if no solution makes the
    model faster, and whether the rest is compiled."""
    settings, folder = command.settings, command.folder
    found = [result for result in results if result.solution]
    for result in found:
        result.spec = await sandbox.spec(Task(result.part.module.name, task_of(result.part, task.code)))

    def solution(chosen: Sequence[PartResult], compiled: bool = False) -> Solution:
        parts = [(one.part, one.solution, one.spec) for one in chosen if one.solution and one.spec]
        return joined(task.code, parts, settings.device, compiled)

    judged: list[Verdict | None] = []

    async def judge(chosen: Sequence[PartResult], compiled: bool = False) -> Verdict | None:
        titles = [one.part.title for one in chosen]
        text = f"measuring the whole model with {', '.join(titles)}" + (_COMPILED if compiled else "")
        command.show({"kind": "judging", "parts": titles, "compiled": compiled}, [text])
        work = sandbox.evaluate(task, solution(chosen, compiled), "strict")
        verdict: Verdict | None = await search.unless(command.stop, work, sandbox)
        judged.append(verdict)
        if verdict is not None:
            gain = f"{verdict.speedup_eager:.2f}×" if verdict.speedup_eager else printable(verdict.message)[:200]
            event = {"kind": "integrated", "parts": titles, "compiled": compiled, "verdict": verdict.to_json()}
            command.show(event, [f"  {verdict.status}, {gain}"])
        return verdict

    verdict, compiled = await keep_fastest(found, judge), False
    kept = [result for result in found if result.kept]
    if verdict is not None and _speed(faster := await judge(kept, compiled=True)) > _PAYS * _speed(verdict):
        verdict, compiled = faster, True
    if verdict is None and any(one is None or one.status == "infra" for one in judged):
        return None, False  # a person or a fault ended the judging: the result of an earlier call stays
    shutil.rmtree(folder / "solution", ignore_errors=True)
    if verdict is None:
        for name in ("verdict.json", "model_new.py"):
            (folder / name).unlink(missing_ok=True)
        return None, False
    best = solution(kept, compiled)
    write_solution(folder / "solution", best.files)
    write_whole(folder / "verdict.json", json.dumps(verdict.to_json(), indent=1))
    try:
        text = model_new(task.code, best, await sandbox.spec(task), settings, _about(kept, verdict, compiled))
    except SolutionError as error:
        raise OptimizeError(f"the result cannot be exported: {error}") from None
    write_whole(folder / "model_new.py", text)
    return verdict, compiled


def _about(kept: Sequence[PartResult], verdict: Verdict, compiled: bool) -> str:
    names = ", ".join(name for result in kept for name in result.part.names)
    return (
        f"`from model_new import ModelNew`: {verdict.speedup_eager or 0:.2f} times as fast as eager PyTorch.\n"
        f"Its submodules {names} are replaced{_COMPILED if compiled else ''}.  For inference.\n"
        "`python model_new.py` compares it with the original and prints the times.\n"
    )


async def keep_fastest(found: Sequence[PartResult], judge: Judge) -> Verdict | None:
    """Chooses the solutions that make the whole model fastest, and marks them as kept.

    First judges the model with each solution alone.  Then adds the solutions that are faster alone, the best first, and
    keeps each that makes the model faster still.

    Args:
        found: The parts with a solution.
        judge: Judges the model with these solutions in strict mode; returns None if a person stops it.

    Returns:
        The verdict on the kept solutions, or None if none is kept."""
    for result in found:
        result.alone = await judge([result])
        result.note = _note(result.alone)
        if result.alone is None:
            break
    ranked = sorted((one for one in found if _speed(one.alone) > _PAYS), key=lambda one: -_speed(one.alone))
    kept = ranked[:1]
    best = kept[0].alone if kept else None
    for result in ranked[1:]:
        verdict = await judge([*kept, result])
        if _speed(verdict) > _PAYS * _speed(best):
            kept, best = [*kept, result], verdict
        elif verdict is None:
            result.note = "not measured together with the others"
            break
        else:
            result.note = "no gain beside the others" if verdict.status == "ok" else _note(verdict)
    for result in kept:
        result.kept = True
    return best


def _speed(verdict: Verdict | None) -> float:
    """Returns the speed-up over eager, or 0 if there is none.  Each strict verdict times eager in turn with the
    solution, so these ratios can be compared although the machine's speed changes."""
    return verdict.speedup_eager or 0.0 if verdict and verdict.status == "ok" else 0.0


def _note(verdict: Verdict | None) -> str:
    """Returns why a part's solution is left out of the model with this verdict, or "" if it may stay."""
    if verdict is None:
        return "not measured in the model"
    if verdict.status != "ok":
        return f"{verdict.status.replace('_', ' ')} in the model: {printable(verdict.message)[:120]}"
    return "" if _speed(verdict) > _PAYS else "no gain in the model"
