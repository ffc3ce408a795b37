"""Synthesizes tasks: proposes candidates and filters them until there are enough tasks of each group.

There are two families of tasks. Tasks of the family "teacher" can be solved by the scripted teacher, a program that
writes kernels. Tasks of the family "catalogue" stack operators of a larger list (``CATALOGUE``), or use one layer of
``transformers``. The groups are training tasks (of both families), held-out tasks of "teacher" and held-out tasks of
"catalogue". In a family, no training task has the same combination of operators as a held-out task. In the family
"teacher", each ending (last operator) of a held-out task is the ending of a training task too, if candidates suffice:
of two where there are at least twice as many training tasks as held-out tasks.

The random generator of candidate number i of a family is seeded with (seed, family, i). Equal configurations, seeds
and results of the sandbox therefore give equal tasks, unless a language model writes the candidates.

The sandbox probes candidates (runs them without a solution). Candidates are accepted in the order of their numbers.
To save time, several later candidates are probed in advance, at the same time.

If ``synthesis.tasks`` names a task set, its tasks are the candidates, and go through the same filters."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from cuda_agent.config import Synthesis
from cuda_agent.errors import TryAgain
from cuda_agent.sandbox.wire import LOST, Probe
from cuda_agent.spans import span
from cuda_agent.synthesis.card import Times, data_card
from cuda_agent.synthesis.catalogue import CATALOGUE
from cuda_agent.synthesis.compose import ComposeError, Composer, ModelWriter, ProgrammaticWriter, speed_of
from cuda_agent.synthesis.filters import (
    Prober,
    SourceFilter,
    TaskRefused,
    check_choice,
    check_compiled,
    check_eager,
    check_headroom,
    yields,
)
from cuda_agent.synthesis.layers import LAYERS
from cuda_agent.synthesis.similarity import duplicate_key, shingles
from cuda_agent.synthesis.stream import FamilyWriter, Stream, read_given
from cuda_agent.synthesis.teacher.family import combination, ending, ops_combination
from cuda_agent.synthesis.teacher.optimum import DesignSearch, Optimum, Swept, optimum_from_json, swept_from_json
from cuda_agent.tasks.inspect import problems
from cuda_agent.tasks.io import read_any
from cuda_agent.tasks.task import Task

PROBES_A_COMPILE = 6  # eager probes per allowed compilation
MOST_LOST = 5  # candidates in a row on which the sandbox fails: then the sandbox is at fault, not a task
WINDOW = 600  # candidates that ``look_ahead`` searches for those to probe
AHEAD = {"cpu": 3, "cuda": 24}  # candidates probed before their turn; with 12, the probers of a GPU were half idle


async def synthesize(
    config: Synthesis,
    seed: int,
    sandbox: Prober,
    *,
    device: str = "cpu",
    threads: int = 2,
    progress: Callable[[int, int], None] | None = None,
    known: Mapping[str, Any] | None = None,
    report: Callable[[str, Any], None] | None = None,
    composer: Composer | None = None,
    sweep: DesignSearch | None = None,
) -> tuple[list[Task], dict[str, Any]]:
    """Makes ``config.train`` + ``config.heldout`` + ``config.catalogue`` tasks, or takes them from ``config.tasks``.
    Returns the tasks (training tasks first) and the data card, a summary as JSON. If a limit of candidates or probes is
    reached, makes fewer tasks. The card's entry "short" then says how many tasks of each group are missing.

    Args:
        threads: Number of CPU threads of the sandbox. The writer of catalogue tasks uses it to predict eager times.
        progress: Called as ``progress(done, total)`` with the number of accepted tasks and of wanted tasks.
        known: The values that an earlier call passed to ``report``, by key. They are not computed again.
        report: Called as ``report(key, JSON value)`` with each new result: of a probe (a run of a candidate without a
            solution), of a sweep, or of the judge's run of the best designs. Also called with each task of a composer
            whose ``repeatable`` is false, because a second call of such a composer may give another task.
        composer: Replaces the configured writer of catalogue tasks.
        sweep: Finds the best design (way to write the kernel) of a task of the teacher's family. For this, it times
            many designs (a sweep), and lets the judge time the fastest. Without ``sweep``, the filters "choice matters"
            and "headroom" pass every task.

    Raises:
        TaskError: The evaluation set or the given task set cannot be read.
        ServedModelError: The server of the language model that writes tasks does not answer.
        TryAgain: The sandbox failed on several candidates in a row."""
    window = (max(config.window_ms[0], 1e-3) * 1e-3, config.window_ms[1] * 1e-3)  # seconds; nothing takes under 1 us
    references = read_any(Path(config.evaluation_set)) if config.evaluation_set else []
    source = SourceFilter([(task.name, shingles(task.code)) for task in references], config.max_similarity)
    total = config.train + config.heldout + config.catalogue
    given = read_given(Path(config.tasks)) if config.tasks else []
    work = _Work(config, seed, sandbox, window, source, dict(known or {}), report or (lambda key, value: None))
    work.sweep, work.ahead, work.most = sweep, AHEAD[device], config.max_candidates
    if config.tasks:
        wanted = {"train": config.train, "heldout": config.heldout + config.catalogue}
        streams, work.most = [Stream("given", None, ops_combination, wanted, given=given)], len(given)
        total = min(total, len(given))
    else:
        from_catalogue = round(config.train * config.catalogue_share)
        family = {"train": config.train - from_catalogue, "heldout": config.heldout}
        whole = {"train": from_catalogue, "heldout": config.catalogue}
        composer = composer or make_composer(config, window, device, threads)
        streams = [
            Stream("teacher", FamilyWriter(device), combination, family, ending),
            Stream("catalogue", composer, ops_combination, whole),
        ]

    try:
        for stream in streams:
            for index in range(stream.attempts):
                if stream.done or work.spent:
                    break
                with span("candidate", family=stream.family, index=index):
                    await work.look_ahead(stream, index)
                    await work.consider(stream, index)
                if progress:
                    progress(sum(len(stream.tasks) for stream in streams), total)
    finally:
        await work.close()

    made = [task for stream in streams for task in stream.tasks]
    tasks = sorted(made, key=lambda task: task.split, reverse=True)  # train before heldout; a stable sort
    facts = {
        "seed": seed,
        "device": device,
        "writer": "given" if config.tasks else config.writer,
        "left_out": max(0, len(given) - len(made) - sum(streams[0].refused.values())),
        "operators": len(CATALOGUE),
        "layers": len(LAYERS),
        "yield": {stream.family: yields(stream.refused, len(stream.tasks)) for stream in streams},
        "reasons": {stream.family: dict(stream.reasons.most_common(20)) for stream in streams},
        "short": {
            f"{stream.family}/{split}": missing
            for stream in streams
            for split, count in stream.wanted.items()
            if (missing := count - stream.made(split)) > 0
        },
        "untrained_endings": sorted(streams[0].untrained()),
        "heldout_combinations": {stream.family: sorted(stream.heldout) for stream in streams},
        "probes": {"eager": work.eager, "compiled": work.compiled},
        "surprises": work.surprises,
        "evaluation_set": {"tasks": len(references), "largest_similarity": max(source.scores, default=None)},
    }
    return tasks, data_card(tasks, work.times, (window[0] * 1e3, window[1] * 1e3), facts)


def optima(tasks: Sequence[Task], known: Mapping[str, Any]) -> dict[str, Optimum]:
    """Returns a dict from a task's name to its best design (way to write the kernel). Tasks whose designs were not
    timed are missing. ``known`` holds the values that ``synthesize`` passed to ``report``, by key."""
    return {task.name: optimum_from_json(known[key]) for task in tasks if (key := f"optimum/{task.digest}") in known}


def make_composer(config: Synthesis, window: tuple[float, float], device: str, threads: int) -> Composer:
    if config.writer == "model":
        assert config.writer_url and config.writer_model, "the schema requires both"
        address = config.writer_url, config.writer_model, config.writer_key_env
        return ModelWriter(*address, window, device, config.max_ops)
    return ProgrammaticWriter(speed_of(device, threads), window, config.max_ops)


class ProbeLost(TaskRefused):
    """The sandbox failed while it measured a candidate. This failure is no evidence against the candidate."""


@lru_cache(maxsize=1024)  # a candidate's key is needed repeatedly before its turn
def _key(code: str) -> str | None:
    return None if problems(code) else duplicate_key(code)


@dataclass
class _Work:
    """The state of one call of ``synthesize``. ``consider`` applies the filters to one candidate. ``look_ahead`` starts
    probes (runs in the sandbox) of later candidates, in the background. ``spent`` is true when the allowed number of
    probes is used up."""

    config: Synthesis
    seed: int
    sandbox: Prober
    window: tuple[float, float]  # accepted eager time, in seconds
    source: SourceFilter
    known: dict[str, Any]  # values that were given to ``report``
    report: Callable[[str, Any], None]
    times: Times = field(default_factory=dict)  # of the accepted tasks
    eager: int = 0  # number of eager probes
    compiled: int = 0  # number of compiled probes
    lost: int = 0  # candidates on which the sandbox failed since the last successful sweep or compiled probe
    most: int = 0  # compiled probes
    ahead: int = AHEAD["cpu"]
    sweep: DesignSearch | None = None
    surprises: list[str] = field(default_factory=list)  # of all sweeps and of the judge, with the task's name
    probes: dict[str, asyncio.Task[Any]] = field(default_factory=dict)  # key -> probe or sweep under way
    composed: dict[tuple[str, int], Task] = field(default_factory=dict)  # family, index -> candidate
    early: dict[tuple[str, int], asyncio.Task[None]] = field(default_factory=dict)  # family, index -> its early probes

    @property
    def spent(self) -> bool:
        return self.compiled >= self.most or self.eager >= PROBES_A_COMPILE * self.most

    async def consider(self, stream: Stream, index: int) -> None:
        try:
            task = await self._compose(stream, index)
            split = self._side(stream, index, task)
            if split is None:
                return
            self.source.check(task)
            self.eager += 1
            eager = await self._probe(task, compile=False)
            check_eager(eager, self.window)
            swept = await self._sweep(task)
            if swept:
                self.lost = 0
                self.surprises += [f"{task.name}: {what}" for what in swept.surprises]
                check_choice(swept)
            self.compiled += 1
            compiled = await self._probe(task, compile=True)
            self.lost = 0
            check_compiled(compiled)
            if swept:
                optimum = await self._optimum(task, swept, compiled)
                self.surprises += [f"{task.name}: {what}" for what in optimum.surprises]
                check_headroom(optimum.speedup, compiled, self.config.headroom)
        except ComposeError as error:
            stream.refused["composed"] += 1
            stream.reasons[f"composed: {error}"] += 1
        except TaskRefused as refused:
            if isinstance(refused, ProbeLost):
                self.lost += 1
                if self.lost == MOST_LOST:
                    raise TryAgain(f"the sandbox failed on {MOST_LOST} candidates in a row: {refused}") from None
            stream.refused[refused.filter] += 1
            stream.failed[stream.kind(task)] += 1
            stream.reasons[str(refused)] += 1
        else:
            assert eager.eager_seconds is not None  # else check_eager refused the task
            self.times[task.name] = (eager.eager_seconds, compiled.compile_seconds)
            stream.accept(task, split)

    async def look_ahead(self, stream: Stream, index: int) -> None:
        """Starts probes (runs in the sandbox) of those candidates after number ``index`` that will most likely be
        needed. Does nothing if candidate ``index`` itself is passed over, or if the composer of ``stream`` cannot write
        the same candidate again (``repeatable``)."""
        if not stream.repeatable:
            return
        self.early = {place: probing for place, probing in self.early.items() if place >= (stream.family, index)}
        pending, expected = 0, {"train": 0.0, "heldout": 0.0}
        combinations, keys = set(stream.heldout), set(self.source.keys)
        for number in range(index, min(index + WINDOW, stream.attempts)):
            with contextlib.suppress(ComposeError):
                task = await self._compose(stream, number)
                split, drawn = self._side(stream, number, task), stream.combination(task)
                taken = bool(stream.composer) and drawn in combinations
                if split is None or taken or (key := _key(task.code)) is None or key in keys:
                    if number == index:
                        return
                    continue
                pending += 1
                expected[split] += stream.rate(stream.kind(task))
                if expected[split] > stream.wanted[split] - stream.made(split):
                    continue
                keys.add(key)
                if split == "heldout":
                    combinations.add(drawn)
                place = (stream.family, number)
                if number > index and place not in self.early:
                    self.early[place] = asyncio.create_task(self._early(task, self.compiled + pending))
            if pending > self.ahead:
                return

    async def _early(self, task: Task, compilations: int) -> None:
        with contextlib.suppress(TaskRefused):
            check_eager(await self._probe(task, compile=False), self.window)
            if compilations <= self.most:
                if swept := await self._sweep(task):
                    check_choice(swept)
                compiled = await self._probe(task, compile=True)
                if swept:
                    check_compiled(compiled)
                    await self._optimum(task, swept, compiled)

    async def close(self) -> None:
        left = [*self.early.values(), *self.probes.values()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _side(self, stream: Stream, index: int, task: Task) -> str | None:
        missing = sum(stream.wanted.values()) - len(stream.tasks)
        scarce = index > stream.attempts / 2 or self.most - self.compiled <= missing
        return stream.side(task, self.seed, scarce)

    async def _compose(self, stream: Stream, index: int) -> Task:
        rng = Random(f"{self.seed}/{stream.family}/{index}")
        if stream.repeatable:
            if (stream.family, index) not in self.composed:
                self.composed[stream.family, index] = await stream.candidate(index, rng)
            return self.composed[stream.family, index]
        key = f"candidate/{stream.family}/{index}"
        if key not in self.known:
            task = await stream.candidate(index, rng)
            self._keep(key, task.__dict__ | {"ops": list(task.ops)})
        return Task(**(self.known[key] | {"ops": tuple(self.known[key]["ops"])}))

    async def _probe(self, task: Task, compile: bool) -> Probe:
        async def probe() -> dict[str, Any]:
            found = await self.sandbox.probe(task, compile=compile)
            if found.error.startswith(LOST):  # not kept: the candidate is probed again when its turn comes
                raise ProbeLost("compiles" if compile else "runs in eager", found.error)
            return found.to_json()

        return Probe.from_json(await self._once(f"{'compiled' if compile else 'eager'}/{task.digest}", probe))

    async def _sweep(self, task: Task) -> Swept | None:
        """Times many designs of ``task`` (ways to write its kernel) and returns the result. Returns None if ``sweep``
        is None, or if ``task`` is not of the teacher's family."""
        if self.sweep is None or task.family != "teacher":
            return None
        sweep = self.sweep

        async def swept() -> dict[str, Any]:
            return asdict(await sweep(task))

        return swept_from_json(await self._once(f"sweep/{task.digest}", swept))

    async def _optimum(self, task: Task, swept: Swept, compiled: Probe) -> Optimum:
        """Returns the best design of ``task`` (way to write its kernel), with the judge's times.

        Raises:
            TaskRefused: By the times in ``swept``, the best design is too slow compared with torch.compile. The judge
                is not called.
            ProbeLost: The sandbox failed, so the judge could not time the designs."""
        check_headroom(swept.speedup, compiled, self.config.headroom)
        assert self.sweep
        search = self.sweep

        async def judged() -> dict[str, Any]:
            found = await search.judged(task, swept)
            if found.seconds is None and not found.surprises:
                raise ProbeLost("headroom", "the judge could not time the best designs")
            return asdict(found)

        return optimum_from_json(await self._once(f"optimum/{task.digest}", judged))

    async def _once(self, key: str, work: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Returns the value for ``key`` in ``known``. If there is none, calls ``work`` to compute it, or waits for an
        earlier call for ``key`` that is still running."""

        async def do() -> None:
            kind, _, digest = key.partition("/")
            try:
                with span(f"probe: {kind}", task=digest):
                    value = await work()
                self._keep(key, value)
            finally:
                self.probes.pop(key, None)

        if key not in self.known:
            if key not in self.probes:
                self.probes[key] = asyncio.create_task(do())
            await self.probes[key]
        found: dict[str, Any] = self.known[key]
        return found

    def _keep(self, key: str, value: Any) -> None:
        self.known[key] = value
        self.report(key, value)
