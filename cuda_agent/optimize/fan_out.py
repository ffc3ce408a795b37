"""Plays a search in several processes that share one store: the steps of `cuda-agent optimize --on CONTEXT` in pods.

    begin    checks the model's server and the problem, and measures the baselines
    player   plays its part of the attempts, one after the other; the players work side by side
    end      judges the best solution in strict mode and makes the folder of the result

The steps use the parts of ``search``, which plays all of this in one process.  A step that is killed may be started
again: an attempt goes on from its last whole turn."""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cuda_agent.agent.progress import NO_TARGET, Event, Find, Goal, State, Transcript, read_events
from cuda_agent.config import SandboxConfig
from cuda_agent.errors import ConfigError
from cuda_agent.optimize.archive import beside
from cuda_agent.optimize.attempt import Attempt, least_tokens
from cuda_agent.optimize.folder import OptimizeError, SearchOrder
from cuda_agent.optimize.search import (
    SearchOutcome,
    baselines_text,
    check_order,
    choose_start,
    confirm,
    look_at,
    served,
    write_result,
)
from cuda_agent.optimize.search_environment import Terms
from cuda_agent.optimize.shared_archive import Archive, SharedArchive, merged, write_transcript
from cuda_agent.sandbox.client import open_sandbox
from cuda_agent.sandbox.wire import Probe, Solution, Verdict
from cuda_agent.tasks.io import task_from_file
from cuda_agent.tasks.task import Task
from cuda_agent.tracking import write_whole

SERVER_VARIABLE, KEY_VARIABLE = "CUDA_AGENT_SEARCH_SERVER", "CUDA_AGENT_SEARCH_KEY"
LONGEST = 900_000  # bytes of an order: a ConfigMap holds at most 1 MiB


@dataclass
class Step:
    """One step of a search, in the process that plays it.  ``folder`` is an empty folder for its files."""

    shared: SharedArchive
    order: SearchOrder
    settings: SandboxConfig
    cache: Path  # where a local sandbox keeps builds and verdicts
    task: Task
    folder: Path
    watch: Callable[[Event], None]

    @property
    def count(self) -> int:
        return beside(self.order.attempts, True)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The facts that ``begin`` has written."""
        return self.shared.facts()

    @property
    def before(self) -> dict[str, dict[str, float]]:
        """What the attempts had used when ``begin`` was played last."""
        return self.facts.get("before", {})

    def clock(self) -> float:
        """Returns the seconds of the search, without those between a stop and the next ``begin``."""
        return time.time() - float(self.facts["began"])


def packed(order: SearchOrder, sandbox: dict[str, Any], name: str, code: str) -> str:
    """Returns the order of a search as canonical JSON: its settings, those of the sandbox, and the problem.  It holds
    neither the address of the model's server nor the name of a key: the pods know both.

    Raises:
        OptimizeError: The problem is too large for a cluster."""
    held = {"order": asdict(replace(order, base_url="", key_env="", lessons="")), "sandbox": sandbox}
    text = json.dumps(held | {"task": name, "code": code}, sort_keys=True, separators=(",", ":"))
    if len(text.encode()) > LONGEST:
        raise OptimizeError(f"the problem is larger than {LONGEST // 1000} kB, which is the most on a cluster")
    return text


def step_of(
    shared: SharedArchive, settings: SandboxConfig, cache: Path, folder: Path, watch: Callable[[Event], None]
) -> Step:
    """Returns a step of the search ``shared``, as its order in the store says.  The address of the model's server comes
    from the environment, never from the order: the key is sent to that address alone.

    Raises:
        ConfigError: The search does not exist, or the environment names no server.
        TaskError: The problem is not a task."""
    held, url = shared.order(), os.environ.get(SERVER_VARIABLE, "")
    if held is None:
        raise ConfigError(f"There is no search {shared.name} in the store.")
    if not url:
        raise ConfigError(f"{SERVER_VARIABLE} is not set: this command is for the chart's pods.")
    terms = Terms(**held["order"]["terms"])
    order = SearchOrder(**held["order"] | {"terms": terms, "base_url": url, "key_env": KEY_VARIABLE, "lessons": ""})
    source = folder / f"{Path(held['task']).name}.py"
    source.write_text(held["code"])
    return Step(shared, order, settings, cache, task_from_file(source), folder, watch)


async def begin(step: Step) -> None:
    """Checks the model's server and the problem, measures the baselines, and writes them to the store.

    Raises:
        OptimizeError: The settings cannot be used, or the tokens do not suffice for a turn of each player.
        TaskError: The problem does not run, or cannot be checked.
        ServedModelError: The model's server does not answer, or does not have the model."""
    order, shared = step.order, step.shared
    check_order(order)
    least = least_tokens(step.task, order.terms)
    if order.tokens is not None and order.tokens // step.count < least:
        whole = f"with {step.count} players, of which each has an equal part, at least {least * step.count} are needed"
        raise OptimizeError(f"--tokens {order.tokens} leave no room for one whole turn: {whole}")
    known, archive = shared.facts(), shared.read()
    elapsed = max((event["at"] for events in archive.transcripts.values() for event in events), default=0.0)
    facts: dict[str, Any] = {"began": time.time() - elapsed, "before": archive.used()}
    transcript, path = _transcript(step, 0, [], lambda: time.time() - facts["began"])
    try:
        device, again = step.settings.device, bool(known)
        transcript.tell("begin", task=step.task.name, order=asdict(order), device=device, resumed=again)
        async with served(order, {}) as model:
            await model.check()
        async with open_sandbox(step.settings, step.cache) as sandbox:
            probe, _ = await look_at(step.task, sandbox, transcript)
    finally:
        transcript.close()
    shared.store.put(shared.key("facts.json"), json.dumps(facts | {"probe": probe.to_json()}).encode())
    shared.add(read_events(path))


async def play_player(step: Step, player: int) -> str:
    """Plays the attempts of ``player`` (from 0), one after the other, and returns why the last one ended.  Attempts
    that are done already are left out.  Before each attempt, and after each of its turns, looks whether another player
    has reached the target."""
    order, goal, why = step.order, step.order.terms.goal, ""
    said = baselines_text(Probe.from_json(step.facts["probe"]), step.settings)
    async with open_sandbox(step.settings, step.cache) as sandbox:
        for number in range(player + 1, order.attempts + 1, step.count):
            archive = step.shared.read()
            if archive.reached(goal):
                return "target"
            if archive.is_done(number):
                why = archive.ended(number)
                continue
            async with served(order, archive.states) as model:
                attempt, close = _attempt(step, archive, number, model, sandbox, said)
                try:
                    if order.search and not attempt.state.messages:
                        if why and (lacking := attempt.lacking):
                            return lacking
                        choose_start(attempt, order.attempts, archive.starts(number), archive.busy(number))
                    why = await attempt.run()
                finally:
                    close()
            if why in ("target", "server"):
                return why
    return why


def _attempt(
    step: Step, archive: Archive, number: int, model: Any, sandbox: Any, said: str
) -> tuple[Attempt, Callable[[], None]]:
    """Returns (the attempt, a function that closes its transcript).  The transcript is published after each turn."""
    shared, goal, findings = step.shared, step.order.terms.goal, archive.findings

    def publish(event: Event, path: Path) -> None:
        if event["kind"] not in ("files", "ended"):
            return
        shared.publish(number, path)
        mine = findings.reached
        if mine is not None and mine.attempt == number:
            shared.tell_reached(goal, mine.solution.digest)
        elif mine is None:
            findings.reached = shared.look_reached(goal)

    transcript, _ = _transcript(step, number, archive.transcripts.get(number, []), step.clock, publish)
    budget = archive.budget(step.order, number, step.count, step.before)
    state = archive.states.get(number, State())
    facts = number, step.task, model, sandbox, step.order.terms, budget, findings, transcript.tell, said, state
    return Attempt(*facts), transcript.close


def _transcript(
    step: Step,
    number: int,
    events: list[Event],
    clock: Callable[[], float],
    publish: Callable[[Event, Path], None] = lambda event, path: None,
) -> tuple[Transcript, Path]:
    """Returns (a transcript of attempt ``number`` that begins with ``events``, its file).  After an event is in the
    file, calls ``publish`` with both."""
    path = step.folder / "attempts" / f"{number}.jsonl"
    write_transcript(path, events)

    def watch(event: Event) -> None:
        step.watch(event)
        publish(event, path)

    return Transcript(path, clock, watch), path


async def end(step: Step) -> SearchOutcome:
    """Judges the best solution of the search in strict mode, and writes the folder of the result to ``step.folder`` /
    "result" and to the store."""
    order, goal, shared = step.order, step.order.terms.goal, step.shared
    archive = shared.read()
    result = step.folder / "result"
    result.mkdir()
    transcript, path = _transcript(step, 0, [], step.clock)
    try:
        async with open_sandbox(step.settings, step.cache) as sandbox:
            best = await confirm(step.task, sandbox, archive.findings, transcript, asyncio.Event())
            spec = await sandbox.spec(step.task)
        strict = best.strict if best else None
        reached = strict is not None and goal.reached(strict)
        events = merged(archive.transcripts)
        spent = next((event for event in reversed(events) if event["kind"] == "spent"), None)
        names = ("prompt", "sampled", "estimated", "cost")
        used = {name: spent[name] if spent else 0 for name in names} | {"seconds": step.clock()}
        notes = [event["text"] for event in events if event["kind"] == "note" and event["attempt"]]
        why = "target" if reached else archive.why()
        outcome = SearchOutcome(result, why, best, goal, reached, used, notes[-1] if notes else "")
        shown = {key: value for key, value in outcome.to_json().items() if key not in ("kind", "verdict", "folder")}
        transcript.tell("outcome", **shown)
    finally:
        transcript.close()
    shared.add(read_events(path))
    write_transcript(result / "transcript.jsonl", merged(archive.transcripts | {-1: read_events(path)}))
    write_whole(result / "model.py", step.task.code)
    write_result(outcome, step.task, spec, Probe.from_json(step.facts["probe"]), order, step.settings)
    shared.store.delete_all(shared.store.list(shared.key("result")))
    for file in sorted(path for path in result.rglob("*") if path.is_file()):
        shared.store.put(shared.key("result", file.relative_to(result).as_posix()), file)
    return outcome


def outcome_of(folder: Path) -> SearchOutcome:
    """Returns the outcome of the search whose result is in ``folder``.  Its solution has no files.

    Raises:
        OptimizeError: ``folder`` holds no result."""
    try:
        events = read_events(folder / "transcript.jsonl")
        told = next(event for event in reversed(events) if event["kind"] == "outcome")
        file = folder / "verdict.json"
        best = Verdict.from_json(json.loads(file.read_text())) if file.exists() else None
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise OptimizeError(f"{folder}: no result of a search ({type(error).__name__}: {error})") from None
    find = Find(Solution(best.format, {}), best, 0, 0, best if best.mode == "strict" else None) if best else None
    goal = Goal(NO_TARGET if told["target"] is None else told["target"], told["until"])
    return SearchOutcome(folder, told["why"], find, goal, told["reached"], told["spent"], told["message"])


def clear_result(folder: Path) -> None:
    """Removes an older solution from ``folder``: a newer result may have none."""
    shutil.rmtree(folder / "solution", ignore_errors=True)
    for name in ("verdict.json", "model_new.py"):
        (folder / name).unlink(missing_ok=True)
