"""`cuda-agent optimize`: one model.py made faster by any model behind an OpenAI-compatible address.

Checks the problem, measures its baselines, lets attempts work side by side until one reaches the target, the budget is
used up or a person stops them, then measures the best solution strictly and writes the folder of the result:

    model.py         the problem          solution/        what was judged: kernels, plan or module
    model_new.py     ModelNew, with PyTorch alone          verdict.json      of strict mode
    transcript.jsonl every event          report.html      one page
    run.json         what was asked, for --resume; holds no key

What it does not cover: the attempt (``agent.attempt``), the exported file (``agent.export``), what is shown
(``optimize_screen``, ``optimize_page``), parsing a command line.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cuda_agent.agent.progress import (
    Event,
    Find,
    Findings,
    SearchBudget,
    State,
    Transcript,
    factor,
    read_events,
    replayed,
)
from cuda_agent.config import SandboxConfig
from cuda_agent.errors import TaskError, UserError
from cuda_agent.optimize.attempt import Attempt, Terms, least_tokens
from cuda_agent.optimize.export import model_new
from cuda_agent.policy.served import ServedModel, ServedModelError, check_address
from cuda_agent.policy.text_calls import Form
from cuda_agent.sandbox.client import open_sandbox
from cuda_agent.sandbox.formats.table import FORMATS
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.wire import Probe, TaskSpec, Verdict, printable
from cuda_agent.tasks.io import task_from_file
from cuda_agent.tasks.task import Task

Watch = Callable[[Event], None]
_CONFIRMED = 5  # solutions that are judged strictly at the end, at most, until one holds
_LONGEST_FILE = 1 << 20
_BEGUN = ("model.py", "run.json", "transcript.jsonl", "report.html")  # all that a folder holds before the first turn
_PLAYED = ("spent", "files", "verdict")  # events of a turn


class OptimizeError(UserError):
    """What was asked cannot be done; the message says why."""


@dataclass(frozen=True)
class SearchOrder:
    """What a person asked for.  ``tokens``, ``minutes`` and ``money`` are for all attempts together."""

    base_url: str
    model: str
    key_env: str = "OPENAI_API_KEY"
    attempts: int = 1
    terms: Terms = field(default_factory=Terms)
    tokens: int | None = None
    minutes: float | None = 60.0
    money: float | None = None
    price_in: float = 0.0
    price_out: float = 0.0

    def __post_init__(self) -> None:
        if self.money is not None and not (self.price_in or self.price_out):
            raise OptimizeError("a budget of money needs prices: --price-in and --price-out, per million tokens")
        if self.terms.context < 2 * self.terms.answer_tokens and self.terms.style == "full":
            raise OptimizeError("--context must be at least twice --answer-tokens: a conversation has to fit in, too")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "SearchOrder":
        return cls(**(data | {"terms": Terms(**data["terms"])}))


@dataclass
class SearchOutcome:
    """``why``: how it ended.  ``best``: with its verdict in strict mode, when there is a correct solution."""

    folder: Path
    why: str
    best: Find | None
    target: float
    reached: bool
    spent: Event
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        verdict = self.best.strict if self.best else None
        return {
            "kind": "outcome", "folder": str(self.folder), "why": self.why, "target": self.target,
            "reached": self.reached, "factor": factor(verdict) if verdict else None, "spent": self.spent,
            "message": self.message, "verdict": verdict.to_json() if verdict else None,
        }  # fmt: skip


def read_order(folder: Path) -> tuple[SearchOrder, dict[str, Any]]:
    """What a folder was begun with: the order, and the values of its sandbox.  Raises ``OptimizeError``."""
    if not (folder / "run.json").is_file():
        raise OptimizeError(f"{folder}: nothing to go on with: it holds no run.json")
    try:
        data = json.loads((folder / "run.json").read_text())
        return SearchOrder.from_json(data["order"]), data["sandbox"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptimizeError(f"{folder}/run.json: nothing to go on with ({type(error).__name__}: {error})") from None


def _so_far(path: Path) -> tuple[dict[int, State], Findings, Event]:
    """What a transcript leaves.  Raises ``OptimizeError`` when it is none."""
    try:
        return replayed(read_events(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptimizeError(f"{path}: not a transcript to go on with ({type(error).__name__}: {error})") from None


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
    """Raises ``TaskError`` for a problem that cannot be run, ``SandboxUnready`` and ``OptimizeError``."""
    try:
        check_address(order.base_url, order.key_env)
    except ServedModelError as error:
        raise OptimizeError(f"--base-url: {error}") from None
    task = task_from_file(source)
    if len(task.code) > _LONGEST_FILE:
        raise TaskError(f"{source}: larger than {_LONGEST_FILE >> 20} MiB")
    if order.tokens is not None and order.tokens < (least := least_tokens(task, order.terms)):
        raise OptimizeError(
            f"--tokens {order.tokens} leave no room for one whole turn "
            f"with --answer-tokens {order.terms.answer_tokens}: "
            f"for this problem that takes about {least}"
        )
    with _opened(order, settings, task, folder, resume):
        return await _search(order, settings, cache, task, folder, resume, watch, stop)


async def _search(
    order: SearchOrder,
    settings: SandboxConfig,
    cache: Path,
    task: Task,
    folder: Path,
    resume: bool,
    watch: Watch,
    stop: asyncio.Event,
) -> SearchOutcome:
    """In a folder that is ready."""
    states, findings, spent = _so_far(folder / "transcript.jsonl") if resume else ({}, Findings(), {})
    minutes = None if order.minutes is None else order.minutes * 60
    budget = SearchBudget(order.tokens, minutes, order.money, order.price_in, order.price_out)
    if spent:
        budget.prompt, budget.sampled, budget.estimated = spent["prompt"], spent["sampled"], spent["estimated"]
        budget.before = spent["seconds"]
    transcript = Transcript(folder / "transcript.jsonl", lambda: budget.elapsed, watch)
    try:
        async with open_sandbox(settings, cache) as sandbox:
            transcript.tell("begin", task=task.name, order=order.to_json(), device=settings.device, resumed=resume)
            looked = await _unless(stop, _look_at(task, sandbox, transcript), sandbox)
            if looked is None:
                raise KeyboardInterrupt
            probe, spec = looked
            async with _served(order, states) as model:
                work = _Attempts(order, task, model, sandbox, budget, findings, transcript, _baselines(probe), states)
                why = await work.run(stop)
            best = await _confirm(task, sandbox, findings, transcript, stop)
            reached = best is not None and (factor(best.strict or best.quick) or 0.0) >= order.terms.target
            outcome = SearchOutcome(folder, why, best, order.terms.target, reached, budget.facts(), work.message)
            transcript.tell("outcome", **{k: v for k, v in outcome.to_json().items() if k not in ("kind", "verdict")})
            write_result(outcome, task, spec, probe, order, settings)
    finally:
        transcript.close()
    return outcome


async def _look_at(task: Task, sandbox: Any, transcript: Transcript) -> tuple[Probe, TaskSpec]:
    """Runs the problem.  Raises ``TaskError`` when it cannot be optimised."""
    transcript.tell("note", text="checking the problem and measuring its baselines", passing=True)
    probe = await sandbox.probe(task)
    if probe.error:
        raise TaskError(f"the problem does not run: {printable(probe.error)}")
    if not probe.deterministic:
        raise TaskError("the same inputs give other outputs each time: nothing can be checked against this problem")
    if probe.constant or probe.indistinguishable:
        transcript.tell("note", text="outputs hardly depend on inputs: a wrong solution may pass for a right one")
    spec = await sandbox.spec(task)
    transcript.tell("baselines", probe=probe.to_json())
    return probe, spec


def _baselines(probe: Probe) -> str:
    known = {"eager PyTorch": probe.eager_seconds, "torch.compile": probe.compile_seconds}
    told = [f"{name} takes {seconds * 1e6:.1f} us" for name, seconds in known.items() if seconds]
    return f"Measured here: {', '.join(told)}." if told else ""


@contextlib.asynccontextmanager
async def _served(order: SearchOrder, states: dict[int, State]) -> Any:
    form: Form = "native"
    if order.terms.style == "compact":
        form = "raw"
    elif any(message.get("raw") for state in states.values() for message in state.messages):
        form = "text"  # found out before
    async with ServedModel(order.base_url, order.model, order.key_env, form=form) as model:
        yield model


class _Attempts:
    """The attempts of one run, side by side."""

    def __init__(
        self,
        order: SearchOrder,
        task: Task,
        model: ServedModel,
        sandbox: Any,
        budget: SearchBudget,
        findings: Findings,
        transcript: Transcript,
        baselines: str,
        states: dict[int, State],
    ) -> None:
        self.order, self.findings, self.transcript = order, findings, transcript
        self.message = ""
        self._attempts = [
            Attempt(
                number, task, model, sandbox, order.terms, budget, findings, self._tell, baselines, states.get(number)
            )
            for number in range(1, order.attempts + 1)
        ]

    def _tell(self, kind: str, **facts: Any) -> None:
        if kind == "note":
            self.message = facts["text"]
        self.transcript.tell(kind, **facts)

    async def run(self, stop: asyncio.Event) -> str:
        """How it ended: as the first attempt that reached the target, or as the last one; ``stopped`` by a person."""
        running = {asyncio.create_task(attempt.run()): attempt.number for attempt in self._attempts}
        stopped = asyncio.create_task(stop.wait())
        why = ""
        try:
            while running and not stop.is_set():
                done, _ = await asyncio.wait([*running, stopped], return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in running if task in done]:
                    del running[task]
                    why = task.result()
                    if why == "target":
                        return why
            return "stopped" if stop.is_set() else why
        finally:
            stopped.cancel()
            for task, number in running.items():
                task.cancel()
                self.transcript.tell("ended", attempt=number, why="stopped", summary="")
            await asyncio.gather(*running, stopped, return_exceptions=True)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, Any], sandbox: Any) -> Any:
    """What ``work`` gives; None, and at once, when a person stops it."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    if isinstance(sandbox, LocalSandbox):
        sandbox.kill()  # a judge answers when it is through, which may be minutes from now
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


async def _confirm(
    task: Task, sandbox: Any, findings: Findings, transcript: Transcript, stop: asyncio.Event
) -> Find | None:
    """The best solution by what strict mode says; a person who stops once more has the best by quick verdicts."""
    stop.clear()
    for _ in range(_CONFIRMED):
        best = findings.best
        if best is None or (best.strict is not None and factor(best.strict) is not None):
            return best
        if best.strict is not None:
            return None  # the ranking puts what did not hold last: nothing held
        transcript.tell("note", text="measuring the best solution strictly", passing=True)
        verdict: Verdict | None = await _unless(stop, sandbox.evaluate(task, best.solution, "strict"), sandbox)
        if verdict is None:
            return best
        transcript.tell(
            "verdict",
            attempt=best.attempt,
            command="end",
            verdict=verdict.to_json(),
            files=best.solution.files,
            factor=factor(verdict),
        )
        if verdict.status == "infra":
            return best
        best.strict = verdict
    return findings.best


# ----------------------------------------------------------------------------------------------------------- the folder


@contextlib.contextmanager
def _opened(order: SearchOrder, settings: SandboxConfig, task: Task, folder: Path, resume: bool) -> Iterator[None]:
    """The folder, ready, and for this process alone.  When what is done in it fails before the first turn, what was
    begun here is taken away again."""
    with contextlib.ExitStack() as held:
        try:
            fresh = not folder.exists()
            if not resume:
                folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(_alone(folder))
            fresh = fresh or any(folder.iterdir())  # an empty folder was made by a person
            _prepare_folder(order, settings, task, folder, resume)
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise OptimizeError(f"{folder}: no folder for the result: {why}") from None
        try:
            yield
        except BaseException:
            if not resume and _unplayed(folder):
                _clear(folder)
                if fresh:
                    folder.rmdir()
            raise


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Raises ``OptimizeError`` when another process works in the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some shared file systems lock no folders
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OptimizeError(f"{folder}: another cuda-agent optimize works in there") from None
        yield
    finally:
        os.close(descriptor)


def _prepare_folder(order: SearchOrder, settings: SandboxConfig, task: Task, folder: Path, resume: bool) -> None:
    """Raises ``OptimizeError`` rather than write over something that is worth keeping."""
    if resume:
        if not (folder / "transcript.jsonl").is_file():
            raise OptimizeError(f"{folder}: nothing to go on with; leave out --resume to begin")
        if (folder / "model.py").read_text() != task.code:
            raise OptimizeError(f"{folder}/model.py has changed since: begin anew in another folder")
    elif any(folder.iterdir()):
        if not _unplayed(folder):
            raise OptimizeError(
                f"{folder} is there already: go on with --resume {folder}, or name another one with --output"
            )
        _clear(folder)
    (folder / "model.py").write_text(task.code)
    sandbox = settings.model_dump(mode="json")
    _write(folder / "run.json", json.dumps({"order": order.to_json(), "sandbox": sandbox}, indent=1))


def _unplayed(folder: Path) -> bool:
    """Whether the folder is one of ours in which no turn was played."""
    paths = list(folder.iterdir())
    if not all(path.name in _BEGUN and path.is_file() and not path.is_symlink() for path in paths):
        return False
    try:
        read_order(folder)
        events = read_events(folder / "transcript.jsonl")
    except (OptimizeError, OSError, ValueError):
        return False
    return not any(event["kind"] in _PLAYED for event in events)


def _clear(folder: Path) -> None:
    for name in _BEGUN:
        (folder / name).unlink(missing_ok=True)


def write_result(
    outcome: SearchOutcome, task: Task, spec: TaskSpec, probe: Probe, order: SearchOrder, settings: SandboxConfig
) -> None:
    """The files of the result, each whole or not at all.  Without a correct solution: the page alone."""
    from cuda_agent.pages.optimize import render

    folder, best = outcome.folder, outcome.best
    if best:
        verdict = best.strict or best.quick
        fresh = folder / "solution.new"
        shutil.rmtree(fresh, ignore_errors=True)
        for name, text in best.solution.files.items():
            path = fresh / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        shutil.rmtree(folder / "solution", ignore_errors=True)
        fresh.rename(folder / "solution")
        _write(folder / "verdict.json", json.dumps(verdict.to_json(), indent=1))
        about = _about(verdict, settings.device)
        _write(folder / "model_new.py", model_new(task.code, best.solution, spec, settings.device, about))
    events = read_events(folder / "transcript.jsonl")
    where = f"{order.model} at {order.base_url}"
    page = render(task.name, task.code, events, best, probe, outcome.why, order.terms.target, where)
    _write(folder / "report.html", page)


def _about(verdict: Verdict, device: str) -> str:
    against = {"eager PyTorch": verdict.speedup_eager, "torch.compile": verdict.speedup_compile}
    told = " and ".join(f"{ratio:.2f} times as fast as {name}" for name, ratio in against.items() if ratio)
    clock = ", by a model clock that measures nothing" if verdict.clock == "model" else ""
    return (
        f"`from model_new import ModelNew`: {told or 'correct'} in {verdict.mode} mode{clock}.\n"
        f"Needs {FORMATS[verdict.format].needs[device]}; kernels are built once and kept. For inference.\n"
    )


def _write(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


# ------------------------------------------------------------------------------------------------------------- stopping


@contextlib.contextmanager
def on_interrupt(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> Iterator[None]:
    """Ctrl-C sets ``stop``, as often as it is pressed.  The signal is blocked and waited for, because a block is what
    child processes inherit: the terminal sends Ctrl-C to the judge as well, which is needed to the end.  Threads that
    libraries started before do not have the block; what they are given comes to the handler."""
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


def with_changes(order: SearchOrder, changes: dict[str, Any]) -> SearchOrder:
    """The order with what was given anew on the command line (no ``None``)."""
    terms = {name: value for name, value in changes.items() if name in Terms.__dataclass_fields__}
    rest = {name: value for name, value in changes.items() if name not in terms}
    return replace(order, terms=replace(order.terms, **terms), **rest)
