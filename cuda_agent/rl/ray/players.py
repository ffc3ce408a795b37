"""Distributes episodes over rollout workers, which are actors of Ray, and collects the finished episodes.

If a worker or its engine is lost, the living workers replay the worker's unfinished episodes from the beginning, with
the same seeds. A new worker replaces the lost worker, and gets the newest weights before it plays."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from cuda_agent import machine
from cuda_agent.agent.loop import EpisodeSettings
from cuda_agent.context import StageContext, WorkerContext
from cuda_agent.errors import BadConfiguration, TryAgain
from cuda_agent.policy.engines.engine import EngineError
from cuda_agent.policy.episode import Episode, from_line, group_of
from cuda_agent.rl.ray.actors import RolloutWorker
from cuda_agent.rl.ray.cluster import on_bundle, open_ray, raise_if_init_failed
from cuda_agent.rl.ray.transfer import parts
from cuda_agent.rl.rollouts import Job, Kind, OnDone

LOSSES = 3  # the stage gives up after this many losses per worker in one round
PLACING_SECONDS = 900.0  # a cluster may have to add nodes
OPENING_SECONDS = 1800.0  # a worker's engine may have to load a large model
CLOSING_SECONDS = 20.0
SILENCE_SECONDS = 600.0  # a worker without an episode or another sign of life for this long counts as lost


class ServedPolicy(NamedTuple):
    """The policy weights from which the workers sample."""

    version: int  # training step of the weights
    digest: str  # digest of the weights
    weights: Any  # reference to the weights in Ray's object store


class WorkerLost(Exception):
    """A rollout worker or its engine is gone."""


@dataclass
class WorkerSlot:
    """A numbered place for one rollout worker. If the worker's actor is lost, a new actor takes the same place."""

    number: int
    actor: Any = None  # None: lost, or not opened yet
    opening: asyncio.Task[None] | None = None  # the task that opens a new actor
    has: ServedPolicy | None = None  # the policy that the actor got last


class EpisodeCollector:
    """Collects the episodes of one round (one call of ``RayPlayers.collect``). The episodes (samples) of one task form
    a group. If a task is drawn twice in the round, it has two groups.

    The collector keeps up to ``samples`` episodes of each group, and prefers episodes with a reward. A group is
    complete when it has ``samples`` episodes with a reward, or when all its episodes have ended. The collector is
    ``full`` when all groups are complete."""

    def __init__(self, jobs: Sequence[Job], samples: int) -> None:
        self._order = {name: index for index, (_, name) in enumerate(jobs)}
        self._open = Counter(group_of(name) for _, name in jobs)  # unfinished episodes per group
        self._wanted = {group: min(count, samples) for group, count in self._open.items()}
        self._kept: dict[str, list[Episode]] = {group: [] for group in self._wanted}

    def add(self, episode: Episode) -> None:
        self._open[episode.group] -= 1
        self._kept[episode.group].append(episode)

    @property
    def full(self) -> bool:
        return all(not self._open[group] or len(self._rewarded(group)) >= self._wanted[group] for group in self._wanted)

    @property
    def cut(self) -> int:
        """The number of unfinished episodes. Once the collector is full, the workers stop playing them."""
        return self._open.total()

    def episodes(self) -> list[Episode]:
        """Returns the kept episodes in the order of their jobs."""
        chosen = []
        for group, episodes in self._kept.items():
            others = [episode for episode in episodes if episode.reward is None]
            chosen += [*self._rewarded(group), *others][: self._wanted[group]]
        return sorted(chosen, key=lambda episode: self._order[episode.id])

    def _rewarded(self, group: str) -> list[Episode]:
        return [episode for episode in self._kept[group] if episode.reward is not None]


class RayPlayers:
    """The rollout workers of one stage. At first they sample from the stage's input policy; ``serve`` gives them new
    weights."""

    def __init__(self, ctx: StageContext, episodes: EpisodeSettings, group: Any, first: int) -> None:
        """Assigns the workers to bundles of the placement group ``group``, from bundle number ``first`` on. A bundle is
        a set of resources that Ray has reserved on one machine."""
        import ray

        self._ray = ray
        self._ctx, self._episodes = ctx, episodes
        self._group, self._first = group, first
        self._settings = ctx.config.ray
        self._inputs = ray.put({name: list(parts(ctx.inputs[name])) for name in ("policy", "tasks")})
        self.workers = [WorkerSlot(number) for number in range(self._settings.workers)]
        self._served: ServedPolicy | None = None
        self._lost = 0  # workers lost since the last completed round

    async def play(self, jobs: Sequence[Job], kind: Kind, on_done: OnDone = lambda episode: None) -> list[Episode]:
        collector = EpisodeCollector(jobs, len(jobs))
        await self.collect(collector, jobs, kind, on_done)
        return collector.episodes()

    async def collect(
        self, collector: EpisodeCollector, jobs: Sequence[Job], kind: Kind, on_done: OnDone = lambda episode: None
    ) -> int:
        """Plays one round: the episodes ``jobs``, until ``collector`` is full. Calls ``on_done`` with each episode when
        it ends. Returns the number of workers lost since the end of the previous round. Raises TryAgain if too many
        workers were lost, or if none is left."""
        for worker in self.workers:
            if worker.opening is not None and worker.opening.done() and worker.opening.exception() is not None:
                self._ctx.tracker.note(f"rollout worker {worker.number} did not start: {worker.opening.exception()}")
                worker.opening = None
            if worker.actor is None and worker.opening is None:  # all replacements failed since the last round
                worker.opening = asyncio.create_task(self._open(worker))

        async def follow(worker: WorkerSlot, actor: Any, share: Sequence[Job]) -> None:
            left = list(share)
            try:
                async with self._losses(SILENCE_SECONDS) as limit:
                    async for reference in actor.play.options(num_returns="streaming").remote(share, kind):
                        line = await reference
                        limit.reschedule(asyncio.get_running_loop().time() + SILENCE_SECONDS)
                        if not line:
                            continue
                        episode = from_line(line)
                        left.remove(next(job for job in left if job[1] == episode.id))
                        collector.add(episode)
                        on_done(episode)
                        if collector.full:
                            break
                if left and not collector.full:
                    raise WorkerLost("it stopped playing")
            except WorkerLost as error:
                self._lose(worker, actor, error)
                await dispatch(left)

        async def dispatch(jobs: Sequence[Job]) -> None:
            if jobs:
                workers = await self._able()
                for number, worker in enumerate(workers):
                    if share := jobs[number :: len(workers)]:
                        followers.add(asyncio.create_task(follow(worker, worker.actor, share)))

        followers: set[asyncio.Task[None]] = set()
        try:
            await dispatch(jobs)
            while not collector.full:
                done, _ = await asyncio.wait(followers, return_when=asyncio.FIRST_COMPLETED)
                followers -= done
                for task in done:
                    task.result()
        finally:
            for task in followers:
                task.cancel()
        if collector.cut:
            await self._of_all(lambda worker, actor: actor.stop.remote())
        lost, self._lost = self._lost, 0
        return lost

    @property
    def living(self) -> list[WorkerSlot]:
        return [worker for worker in self.workers if worker.actor is not None]

    async def _able(self) -> list[WorkerSlot]:
        while not self.living:
            opening = [worker.opening for worker in self.workers if worker.opening is not None]
            if not opening:
                raise TryAgain("no rollout worker is left")
            done, _ = await asyncio.wait(opening, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return self.living

    async def _of_all(self, call: Callable[[WorkerSlot, Any], Awaitable[Any]]) -> None:
        """Awaits ``call`` for all living workers at once. Replaces workers that are lost during the call."""

        async def one(worker: WorkerSlot, actor: Any) -> None:
            try:
                async with self._losses(OPENING_SECONDS):
                    await call(worker, actor)
            except WorkerLost as error:
                self._lose(worker, actor, error)

        await asyncio.gather(*(one(worker, worker.actor) for worker in self.living))

    def _lose(self, worker: WorkerSlot, actor: Any, error: WorkerLost) -> None:
        """Replaces the lost ``actor`` of ``worker`` in the background. Raises TryAgain after too many losses."""
        if worker.actor is not actor:
            return  # reported before
        worker.actor = None
        self._ray.kill(actor)
        self._lost += 1
        self._ctx.tracker.note(f"rollout worker {worker.number} was lost: {str(error).splitlines()[0][:200]}")
        if self._lost > LOSSES * len(self.workers):
            raise TryAgain(f"{self._lost} rollout workers were lost one after the other, the last one: {error}")
        worker.opening = asyncio.create_task(self._open(worker))

    async def _open(self, worker: WorkerSlot) -> None:
        settings, worker.has = self._settings, None
        options = on_bundle(self._group, self._first + worker.number, settings.worker_cpus, settings.worker_gpus)
        made = self._ray.remote(cast(Any, RolloutWorker)).options(**options)
        actor = made.remote(_context(self._ctx, worker.number), self._episodes, self._inputs)
        try:
            async with self._losses(OPENING_SECONDS):
                await actor.open.remote()
            while self._served is not None and worker.has is not self._served:
                async with self._losses(OPENING_SECONDS):
                    await self._give(worker, actor, self._served)
        except WorkerLost as error:
            worker.actor, worker.opening = actor, None
            self._lose(worker, actor, error)
            await worker.opening  # type: ignore[misc]
            return
        worker.actor, worker.opening = actor, None

    async def serve(self, served: ServedPolicy) -> None:
        """Makes all workers play ``served``. Turns under way finish on the old weights."""
        self._served = served
        await self._of_all(lambda worker, actor: self._give(worker, actor, served))

    async def _give(self, worker: WorkerSlot, actor: Any, served: ServedPolicy) -> None:
        await actor.serve.remote(served.version, served.weights, served.digest)
        worker.has = served

    @asynccontextmanager
    async def _losses(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """Limits the time of the ``with`` block, which calls one worker's actor, to ``seconds``. Yields the time limit,
        so that the block can extend it. Errors of the actor that are not listed here pass unchanged.

        Raises:
            WorkerLost: The time is up, the actor is gone, or the actor raised EngineError or TryAgain.
            RuntimeError: The actor's constructor failed."""
        try:
            async with asyncio.timeout(seconds) as limit:
                yield limit
        except TimeoutError:
            raise WorkerLost("it took too long") from None
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, (EngineError, TryAgain)):
                raise WorkerLost(str(error.cause)) from error
            raise (error.cause if isinstance(error.cause, Exception) else error) from error
        except self._ray.exceptions.RayError as error:
            raise_if_init_failed(error)
            raise WorkerLost(f"{type(error).__name__} {error}") from error

    async def open(self) -> None:
        """Opens all workers at once, and waits until they can play."""
        for worker in self.workers:
            worker.opening = asyncio.create_task(self._open(worker))
        await asyncio.gather(*(worker.opening for worker in self.workers if worker.opening is not None))

    async def close(self) -> None:
        for worker in self.workers:
            if worker.opening is not None:
                worker.opening.cancel()
        await end_actors([worker.actor for worker in self.living])


async def end_actors(actors: Sequence[Any]) -> None:
    """Asks all ``actors`` to close, waits for at most ``CLOSING_SECONDS``, and then kills all of them."""
    import ray

    closing = [asyncio.ensure_future(actor.close.remote()) for actor in actors]
    if closing:
        await asyncio.wait(closing, timeout=CLOSING_SECONDS)
    for future in closing:
        with suppress(Exception, asyncio.CancelledError):
            future.exception() if future.done() else future.cancel()
    for actor in actors:
        ray.kill(actor)


@asynccontextmanager
async def open_placement_group(ctx: StageContext, trainers: int) -> AsyncIterator[Any]:
    """Connects to Ray, or starts it, and yields a placement group. The group consists of bundles; a bundle is a set of
    resources that Ray reserves on one machine. The first ``trainers`` bundles are for the trainer. The others are for
    the rollout workers, one each.

    Raises:
        BadConfiguration: Ray is not installed, this machine has too few GPUs, or ``policy.vllm.servers`` is set but
            lists too few servers.
        TryAgain: Ray does not start, or does not provide the bundles in time."""
    settings, servers = ctx.config.ray, ctx.config.policy.vllm.servers
    if servers and len(servers) < settings.workers:
        has = f"policy.vllm.servers has {len(servers)} for them"
        raise BadConfiguration(f"ray.workers is {settings.workers}, and {has}")
    bundles = [{"CPU": settings.trainer_cpus, "GPU": settings.trainer_gpus}] * trainers
    bundles += [{"CPU": settings.worker_cpus, "GPU": settings.worker_gpus}] * settings.workers
    bundles = [{name: count for name, count in bundle.items() if count} or {"CPU": 0.01} for bundle in bundles]
    gpus = math.ceil(sum(bundle.get("GPU", 0.0) for bundle in bundles))
    if settings.address is None and gpus > (here := machine.gpus()):
        asked = "ray.worker_gpus and ray.trainer_gpus add" if trainers else "ray.worker_gpus adds"
        raise BadConfiguration(f"{asked} up to {gpus}, and this machine has {here}")
    cpus = sum(bundle.get("CPU", 0.0) for bundle in bundles)
    weights = sum(path.stat().st_size for path in ctx.inputs["policy"].rglob("*") if path.is_file())
    with open_ray(settings.address, math.ceil(cpus), gpus, 3 * weights):
        from ray.util.placement_group import placement_group, remove_placement_group

        group = placement_group(bundles, strategy="SPREAD")
        try:
            ready, _ = await asyncio.wait([asyncio.ensure_future(group.ready())], timeout=PLACING_SECONDS)
            if not ready:
                raise TryAgain(f"Ray found no place for {bundles} within {PLACING_SECONDS:.0f} s")
            yield group
        finally:
            remove_placement_group(group)


@asynccontextmanager
async def open_players(ctx: StageContext, episodes: EpisodeSettings) -> AsyncIterator[RayPlayers]:
    """Connects to Ray, or starts it, and opens rollout workers that sample from the stage's input policy. Raises
    BadConfiguration or TryAgain for the reasons that ``open_placement_group`` lists. Also raises TryAgain if too many
    workers are lost while they open."""
    async with open_placement_group(ctx, 0) as group:
        players = RayPlayers(ctx, episodes, group, 0)
        try:
            await players.open()
            yield players
        finally:
            await players.close()


def _context(ctx: StageContext, worker: int) -> WorkerContext:
    """Returns the context of rollout worker number ``worker``, with vLLM servers that no other worker uses."""
    vllm = ctx.config.policy.vllm
    vllm = vllm.model_copy(update={"servers": vllm.servers[worker :: ctx.config.ray.workers]})
    config = ctx.config.model_copy(update={"policy": ctx.config.policy.model_copy(update={"vllm": vllm})})
    return WorkerContext(ctx.name, config, {}, Path(), ctx.cache.absolute())
