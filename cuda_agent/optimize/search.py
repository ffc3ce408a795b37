"""Runs the search of `cuda-agent optimize`, in which a language model writes a faster solution for one model.py.

The search checks the problem (model.py) and measures its baselines, eager PyTorch and ``torch.compile``.  It then runs
attempts side by side until one of them reaches the target speed-up, all of them have ended (for example, because the
budget is used up), or a person stops the search.  Finally it judges the best solution in strict mode, which checks and
measures more carefully than quick mode, and writes the result."""

import asyncio
import contextlib
import json
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cuda_agent.agent.progress import (
    NO_TARGET,
    Event,
    Find,
    Findings,
    Goal,
    SearchBudget,
    State,
    Tell,
    Transcript,
    factor,
    read_events,
)
from cuda_agent.agent.tools import limiter
from cuda_agent.config import SandboxConfig
from cuda_agent.errors import SandboxUnready, TaskError
from cuda_agent.optimize import lessons
from cuda_agent.optimize.archive import beside, choose
from cuda_agent.optimize.attempt import Attempt, least_tokens
from cuda_agent.optimize.export import model_new
from cuda_agent.optimize.folder import OptimizeError, SearchOrder, opened, so_far, write_solution
from cuda_agent.policy.chat import Form
from cuda_agent.policy.served import ServedModel, ServedModelError, check_address
from cuda_agent.sandbox.client import open_sandbox
from cuda_agent.sandbox.formats.table import FORMATS
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.wire import Probe, TaskSpec, Verdict, printable
from cuda_agent.tasks.inspect import with_advice
from cuda_agent.tasks.io import task_from_file
from cuda_agent.tasks.task import Task
from cuda_agent.tracking import write_whole

Watch = Callable[[Event], None]
_CONFIRMED = 5  # most solutions judged strictly at the end, until one is confirmed
_LONGEST_FILE = 1 << 20
_LOOK_SECONDS = 0.2  # between looks for the first correct solution
_GAIN = 1.05  # least speed-up of which there is a lesson
_LESSON_SECONDS = 60.0  # longest wait for the model's lesson


@dataclass
class SearchOutcome:
    """What a search found, why it ended, and how much of its budget it used."""

    folder: Path  #: holds the result
    why: str  #: why the search ended, a key of ``progress.ENDS``
    best: Find | None  #: the best correct solution; None if there is none, or strict mode confirmed none
    goal: Goal  #: what the user asked for
    reached: bool  #: whether ``best`` reaches the goal in strict mode
    spent: Event  #: how much of the budget was used, from ``SearchBudget.facts``
    message: str = ""  #: the latest note about an attempt

    def to_json(self) -> dict[str, Any]:
        verdict = self.best.strict if self.best else None
        return {
            "kind": "outcome", "folder": str(self.folder), "why": self.why,
            "target": None if self.goal.target >= NO_TARGET else self.goal.target, "until": self.goal.until,
            "reached": self.reached, "factor": factor(verdict) if verdict else None, "spent": self.spent,
            "message": self.message, "verdict": verdict.to_json() if verdict else None,
        }  # fmt: skip


async def optimize(
    order: SearchOrder,
    settings: SandboxConfig,
    cache: Path,
    source: Path,
    folder: Path,
    resume: bool,
    watch: Watch,
    stop: asyncio.Event,
) -> SearchOutcome:
    """Searches for a faster solution and writes the result into ``folder``.

    Args:
        source: The file with the problem, model.py.
        folder: The folder of the result; with ``resume`` it holds the search to continue.
        watch: A function that receives every event.
        stop: An event that a person sets; the search then ends with the best solution so far.

    Raises:
        TaskError: The problem cannot be read or run, or its outputs cannot be checked.
        SandboxUnready: The sandbox cannot start, for example because an isolation feature or the compiler is missing.
        OptimizeError: The model's address, the token limit or the folder cannot be used.
        UserError: The file of lessons cannot be read.
        ServedModelError: The model's server does not answer, or does not have the model.
        KeyboardInterrupt: ``stop`` was set before the baselines were measured."""
    check_order(order)
    task = task_from_file(source)
    if len(task.code) > _LONGEST_FILE:
        raise TaskError(f"{source}: larger than {_LONGEST_FILE >> 20} MiB")
    if order.tokens is not None and order.tokens < (least := least_tokens(task, order.terms)):
        takes = f"--answer-tokens {order.terms.answer_tokens}: for this problem that takes about {least}"
        raise OptimizeError(f"--tokens {order.tokens} leave no room for one whole turn with {takes}")
    known, broken = lessons.read(Path(order.lessons)) if order.learns else ([], [])
    device = lessons.device_name(settings.device, settings.clock)
    with opened(order, settings, task, folder, resume):
        states, findings, spent = so_far(folder / "transcript.jsonl") if resume else ({}, Findings(), {})
        minutes = None if order.minutes is None else order.minutes * 60
        budget = SearchBudget(order.tokens, minutes, order.money, order.price_in, order.price_out)
        if spent:
            budget.prompt, budget.sampled, budget.estimated = spent["prompt"], spent["sampled"], spent["estimated"]
            budget.before = spent["seconds"]
        transcript = Transcript(folder / "transcript.jsonl", lambda: budget.elapsed, watch)
        try:
            transcript.tell("begin", task=task.name, order=asdict(order), device=settings.device, resumed=resume)
            for line in broken:
                transcript.tell("note", text=line)
            async with served(order, states) as model:
                transcript.tell("note", text=f"asking {order.base_url} for {order.model}", passing=True)
                await unless(stop, model.check())
                if stop.is_set():
                    raise KeyboardInterrupt
                async with open_sandbox(settings, cache) as sandbox:
                    looked = await unless(stop, look_at(task, sandbox, transcript), sandbox)
                    if looked is None:
                        raise KeyboardInterrupt
                    probe, spec = looked
                    said = baselines_text(probe, settings)
                    facts = task, model, sandbox, order.terms, budget, findings, transcript.tell, said
                    numbers = range(1, max(order.attempts, *states, 0) + 1)  # after a resume, also those that began
                    told = [one for one in known if one.device == device] if order.learns else None
                    attempts = [Attempt(number, *facts, states.get(number, State()), told) for number in numbers]
                    why = await run_attempts(attempts, order, findings, transcript.tell, stop)
                    best = await confirm(task, sandbox, findings, transcript, stop)
                    if order.learns and best and why != "stopped":
                        learning = _learn(Path(order.lessons), device, task, best, attempts, findings, transcript)
                        await unless(stop, learning)
            strict = best.strict if best else None
            goal = order.terms.goal
            reached = strict is not None and goal.reached(strict)
            outcome = SearchOutcome(folder, why, best, goal, reached, budget.facts(), transcript.note)
            shown = {key: value for key, value in outcome.to_json().items() if key not in ("kind", "verdict")}
            transcript.tell("outcome", **shown)
            write_result(outcome, task, spec, probe, order, settings)
        finally:
            transcript.close()
        return outcome


def check_order(order: SearchOrder) -> None:
    """Checks the address of the model's server, and that solutions are timed on the device.

    Raises:
        OptimizeError: One of them cannot be used."""
    try:
        check_address(order.base_url, order.key_env)
    except ServedModelError as error:
        raise OptimizeError(f"--base-url: {error}") from None
    if why := FORMATS[order.terms.format].untimed.get(order.terms.device):
        raise OptimizeError(f"--format {order.terms.format} --device {order.terms.device}: {why}")


async def look_at(task: Task, sandbox: Any, transcript: Transcript) -> tuple[Probe, TaskSpec]:
    transcript.tell("note", text="checking the problem, then timing eager PyTorch and torch.compile", passing=True)
    probe = await checked(task, sandbox)
    if found := ", ".join(probe.lets_through):
        transcript.tell("note", text=f"the check of this problem lets wrong answers through: {found}")
    spec = await sandbox.spec(task)
    transcript.tell("baselines", probe=probe.to_json())
    return probe, spec


async def checked(task: Task, sandbox: Any, compile: bool = True) -> Probe:
    """Returns the probe of ``task`` (see ``LocalSandbox.probe``).

    Raises:
        TaskError: The task does not run, or its outputs differ from call to call."""
    probe: Probe = await sandbox.probe(task, compile)
    if probe.error:
        raise TaskError(f"the problem does not run: {with_advice(printable(probe.error))}")
    if not probe.deterministic:
        raise TaskError("the same inputs give other outputs each time: nothing can be checked against this problem")
    return probe


def baselines_text(probe: Probe, settings: SandboxConfig) -> str:
    known = {"eager PyTorch": probe.eager_seconds, "torch.compile": probe.compile_seconds}
    measured = [f"{name} takes {seconds * 1e6:.1f} us" for name, seconds in known.items() if seconds]
    sentences = ["Models stay in train()."] if settings.train_mode else []
    return " ".join([*([f"Measured here: {', '.join(measured)}."] if measured else []), *sentences])


def served(order: SearchOrder, states: dict[int, State]) -> ServedModel:
    form: Form = "native"
    if order.terms.style == "compact":
        form = "raw"
    elif any(message.get("raw") for state in states.values() for message in state.messages):
        form = "text"  # the earlier search found that the server has no native tool calls
    return ServedModel(order.base_url, order.model, order.key_env, form=form)


async def run_attempts(
    attempts: Sequence[Attempt], order: SearchOrder, findings: Findings, tell: Tell, stop: asyncio.Event
) -> str:
    """Runs ``attempts``, which share one budget.  With ``order.search``, runs some of them at a time
    (``archive.beside``), and later attempts start from solutions of earlier ones.  Without it, runs all side by side.
    Returns "target" as soon as one reaches the target, "stopped" if ``stop`` is set, else the reason why the last
    attempt ended.  ``tell`` receives the ends of attempts that are cancelled."""

    def places() -> int:
        return beside(len(attempts), bool(findings.by_digest)) if order.search else len(attempts)

    waiting = deque(attempts)
    running: dict[asyncio.Task[str], Attempt] = {}
    stopped = asyncio.create_task(stop.wait())
    why = ""
    try:
        while not stop.is_set():
            while waiting and len(running) < places():
                attempt = waiting.popleft()
                if order.search and not attempt.state.messages:
                    if why and (lacking := attempt.lacking):  # the first attempt tells what it lacks
                        why = lacking
                        waiting.clear()
                        break
                    starts = [one.state.parent for one in attempts[: attempt.number - 1]]
                    choose_start(attempt, len(attempts), starts, {one.number for one in running.values()})
                running[asyncio.create_task(attempt.run())] = attempt
            if not running:
                return why
            look = None if findings.by_digest or not waiting else _LOOK_SECONDS
            done, _ = await asyncio.wait([*running, stopped], timeout=look, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task in done]:
                del running[task]
                why = task.result()
                if why == "target":
                    return why
                if why == "server":
                    waiting.clear()
        return "stopped"
    finally:
        stopped.cancel()
        for task, attempt in running.items():
            task.cancel()
            tell("ended", attempt=attempt.number, why="stopped", summary="")
        await asyncio.gather(*running, stopped, return_exceptions=True)


def choose_start(attempt: Attempt, attempts: int, starts: Sequence[str | None], busy: Collection[int]) -> None:
    """Lets ``attempt``, one of ``attempts``, start from a solution of an earlier attempt, if ``archive.choose`` finds
    one.  ``starts`` and ``busy`` are those of ``archive.choose``."""
    finds, first = [*attempt.findings.by_digest.values()], beside(attempts, False)
    if parent := choose(finds, starts, first, attempt.terms.seed, busy):
        attempt.start_from(parent)


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, Any], sandbox: Any = None) -> Any:
    """Returns the result of ``work``.  If ``stop`` is set first, cancels ``work``, kills a local ``sandbox``, and
    returns None."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    if isinstance(sandbox, LocalSandbox):
        sandbox.kill()  # a judge may need minutes to answer
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


async def confirm(
    task: Task, sandbox: Any, findings: Findings, transcript: Transcript, stop: asyncio.Event
) -> Find | None:
    """Judges the fastest solution in strict mode, which checks and measures more carefully than quick mode.  The strict
    verdict can change the ranking, so that another solution becomes the fastest.  Repeats until the fastest solution
    has a strict verdict, but judges at most ``_CONFIRMED`` solutions.  Returns the fastest solution that strict mode
    confirms as correct, or None if there is none.

    Clears ``stop`` first, because it may have been set to end the attempts.  If ``stop`` is set again or the sandbox
    fails, judges no more solutions.  If no solution is confirmed by then, returns the one whose judgement was cut
    short; it has no strict verdict."""
    stop.clear()
    unconfirmed: Find | None = None
    for _ in range(_CONFIRMED):
        best = findings.best
        if best is None or best.strict is not None:  # a solution that strict mode refuses ranks last
            break
        transcript.tell("note", text="measuring the best solution strictly", passing=True)
        try:
            verdict: Verdict | None = await unless(stop, sandbox.evaluate(task, best.solution, "strict"), sandbox)
        except SandboxUnready as error:
            transcript.tell("note", text=f"the best solution is not confirmed: {error}")
            verdict = None
        if verdict is not None:
            said = {"verdict": verdict.to_json(), "files": best.solution.files, "factor": factor(verdict)}
            transcript.tell("verdict", attempt=best.attempt, command="end", **said)
        if verdict is None or verdict.status == "infra":
            unconfirmed = best
            break
        best.strict = verdict
    judged = {digest: find for digest, find in findings.by_digest.items() if find.strict is not None}
    confirmed = Findings({digest: find for digest, find in judged.items() if find.strict and factor(find.strict)}).best
    if judged and confirmed is None and unconfirmed is None:
        transcript.tell("note", text=f"strict mode confirmed none of the {len(judged)} solutions that it judged")
    return confirmed or unconfirmed


async def _learn(
    path: Path,
    device: str,
    task: Task,
    best: Find,
    attempts: Sequence[Attempt],
    findings: Findings,
    transcript: Transcript,
) -> None:
    """Adds the lesson of a search to the file ``path``, and tells it in the transcript.  The model that wrote ``best``
    states it.  Without a gain that strict mode confirms there is no lesson."""
    gained = factor(best.strict) if best.strict else None
    writer = next((attempt for attempt in attempts if attempt.number == best.attempt), None)
    if writer is None or gained is None or gained < _GAIN:
        return
    try:
        text = await asyncio.wait_for(writer.lesson(gained), _LESSON_SECONDS)
        solutions = [text for find in findings.by_digest.values() for text in find.solution.files.values()]
        if not (why := lessons.refusal(text, solutions)):
            ops, limit = lessons.short_names(task.ops), limiter(best.strict or best.quick)[0]
            if not lessons.add(path, lessons.Lesson(ops, limit, device, gained, text)):
                why = f"{path} holds it already"
    except (ServedModelError, OSError, TimeoutError) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    said = f"no lesson is kept: {why}" if why else f"a lesson for later searches, kept in {path}: {text}"
    transcript.tell("note", text=said)


def write_result(
    outcome: SearchOutcome, task: Task, spec: TaskSpec, probe: Probe, order: SearchOrder, settings: SandboxConfig
) -> None:
    """Writes report.html to the folder of ``outcome``.  If ``outcome`` has a solution, also writes the solution, its
    verdict and ``model_new.py``.  Without a solution, removes these three if they exist.  They come from an earlier
    part of a resumed search, and strict mode has rejected their solution since."""
    from cuda_agent.pages.optimize import render

    folder, best = outcome.folder, outcome.best
    if best:
        verdict = best.strict or best.quick
        fresh = folder / "solution.new"
        shutil.rmtree(fresh, ignore_errors=True)
        write_solution(fresh, best.solution.files)
        shutil.rmtree(folder / "solution", ignore_errors=True)
        fresh.rename(folder / "solution")
        write_whole(folder / "verdict.json", json.dumps(verdict.to_json(), indent=1))
        about = _about(verdict, settings.device)
        write_whole(folder / "model_new.py", model_new(task.code, best.solution, spec, settings, about))
    else:
        shutil.rmtree(folder / "solution", ignore_errors=True)
        for name in ("verdict.json", "model_new.py"):
            (folder / name).unlink(missing_ok=True)
    events = read_events(folder / "transcript.jsonl")
    where = f"{order.model} at {order.base_url}"
    page = render(task.name, task.code, events, best, probe, outcome.why, order.terms.goal, where)
    write_whole(folder / "report.html", page)


def _about(verdict: Verdict, device: str) -> str:
    against = {"eager PyTorch": verdict.speedup_eager, "torch.compile": verdict.speedup_compile}
    measured = " and ".join(f"{ratio:.2f} times as fast as {name}" for name, ratio in against.items() if ratio)
    clock = ", by a model clock that measures nothing" if verdict.clock == "model" else ""
    return (
        f"`from model_new import ModelNew`: {measured or 'correct'} in {verdict.mode} mode{clock}.\n"
        f"Needs {FORMATS[verdict.format].needs[device]}; kernels are built once and kept. For inference.\n"
        "`python model_new.py` compares it with the original and prints the times.\n"
    )


@contextlib.contextmanager
def on_interrupt(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> Iterator[None]:
    """Sets ``stop`` at every Ctrl-C inside the ``with`` block.

    A Ctrl-C also sends SIGINT to child processes, such as the judge, which must survive it.  Child processes inherit a
    blocked signal, but not a handler.  So this thread blocks SIGINT, and another thread waits for SIGINT.  Threads that
    libraries started earlier do not block SIGINT, and one of them may receive it.  For this case there is also a signal
    handler, which sets ``stop``."""
    loop.add_signal_handler(signal.SIGINT, stop.set)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    over = threading.Event()

    def wait() -> None:
        while not over.is_set():
            if signal.sigtimedwait({signal.SIGINT}, 0.2) is not None and not over.is_set():
                loop.call_soon_threadsafe(stop.set)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        loop.remove_signal_handler(signal.SIGINT)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
