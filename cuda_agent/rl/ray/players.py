"""Ray's rollout workers: episodes are dealt out to them, and come back.

A worker that is lost, or whose engine is, loses what it was playing: the others play it again, with the same seeds, and
a new worker takes its place, which is given the newest weights before it plays.

Not here: where new weights come from (``ray_runtime``), what a worker does (``ray_actors``), and Ray's own processes
(``ray_cluster``).
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from cuda_agent.context import StageContext, WorkerContext
from cuda_agent.errors import BadConfiguration, TryAgain
from cuda_agent.policy.engines.engine import EngineError
from cuda_agent.policy.episode import Episode, from_line, group_of
from cuda_agent.rl.ray.actors import RolloutWorker
from cuda_agent.rl.ray.cluster import on_bundle, open_ray, raise_if_init_failed
from cuda_agent.rl.ray.transfer import pack
from cuda_agent.rl.rollouts import EpisodeBudget, Job, Kind

LOSSES = 3  # of workers in one round, times their number, until the stage gives up
PLACING_SECONDS = 900.0  # a cluster may have to start machines
OPENING_SECONDS = 1800.0  # a worker's engine may have to load a large model
CLOSING_SECONDS = 20.0
GRACE_SECONDS = 60.0  # beyond the deadlines of a worker's episodes


class Served(NamedTuple):
    """What the workers play with.  ``weights``: where Ray keeps them, if it does."""

    version: int
    digest: str
    weights: Any


class Lost(Exception):
    """An actor, or the engine in it, is gone or serves no more."""


class WorkerSlot:
    """A rollout worker's place, and who is in it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.actor: Any = None  # none: lost, or not opened yet
        self.opening: asyncio.Task[None] | None = None
        self.has: tuple[int, str] | None = None  # version and digest of the weights that it plays with
        self.received = False  # the newest, by broadcast, and does not play with them yet


class EpisodeCollector:
    """The episodes of one round as they come in.  Of every group the first to finish with a reward are kept, at most
    ``samples``, or, where fewer have one, all; it is ``full`` when every group has as many as it can."""

    def __init__(self, jobs: Sequence[Job], samples: int) -> None:
        self._order = {name: index for index, (_, name) in enumerate(jobs)}
        self._open = Counter(group_of(name) for _, name in jobs)  # of each group, not finished yet
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
        """How many were begun and are not waited for."""
        return self._open.total()

    def episodes(self) -> list[Episode]:
        """In the order of the jobs, whatever the order they came in."""
        chosen = []
        for group, episodes in self._kept.items():
            others = [episode for episode in episodes if episode.reward is None]
            chosen += [*self._rewarded(group), *others][: self._wanted[group]]
        return sorted(chosen, key=lambda episode: self._order[episode.id])

    def _rewarded(self, group: str) -> list[Episode]:
        return [episode for episode in self._kept[group] if episode.reward is not None]


class RayPlayers:
    """The rollout workers of one stage.  ``newest`` gives what is served with its weights, for a worker that comes
    late, or nothing when there will be something newer; without it the workers play the policy that they were opened
    with."""

    def __init__(
        self,
        ctx: StageContext,
        budget: EpisodeBudget,
        group: Any,
        first: int,
        newest: Callable[[Served], Awaitable[Served | None]] | None = None,
    ) -> None:
        """On the bundles of ``group`` from number ``first`` on."""
        import ray

        self._ray = ray
        self._ctx, self._budget = ctx, budget
        self._group, self._first = group, first
        self._places = ctx.config.ray
        self._newest = newest
        self._site = WorkerContext(ctx.name, ctx.config, {}, Path(), ctx.cache.absolute())
        self._inputs = ray.put({name: pack(ctx.inputs[name]) for name in ("policy", "tasks")})
        self.workers = [WorkerSlot(number) for number in range(self._places.workers)]
        self._served: Served | None = None
        self._newer = asyncio.Event()  # of that which is served now: there is something newer
        self._lost = 0  # workers, since a round was last played to its end

    # ---------------------------------------------------------------------------------------------------------- playing

    async def play(
        self, jobs: Sequence[Job], kind: Kind, on_done: Callable[[Episode], None] = lambda episode: None
    ) -> list[Episode]:
        """As ``rollouts.Players.play``."""
        collector = EpisodeCollector(jobs, len(jobs))
        await self.collect(collector, jobs, kind, on_done)
        return collector.episodes()

    async def collect(
        self,
        collector: EpisodeCollector,
        jobs: Sequence[Job],
        kind: Kind,
        on_done: Callable[[Episode], None] = lambda episode: None,
    ) -> int:
        """Has ``jobs`` played until ``collector`` is full; how many workers were lost since the round before."""
        for worker in self.workers:
            if worker.actor is None and worker.opening is None:  # too many were lost between two rounds, one by one
                worker.opening = asyncio.create_task(self._open(worker))

        async def follow(worker: WorkerSlot, actor: Any, share: Sequence[Job]) -> None:
            left = list(share)
            try:
                async with asyncio.timeout(self._patience(len(share))):
                    with self._losses():
                        stream = actor.play.options(num_returns="streaming").remote(share, kind)
                        async for reference in stream:
                            episode = from_line(await reference)
                            left.remove(next(job for job in left if job[1] == episode.id))
                            collector.add(episode)
                            on_done(episode)
                            if collector.full:
                                break
                if left and not collector.full:
                    raise Lost("it stopped playing")
            except (TimeoutError, Lost) as error:
                self.lose(worker, actor, error)
                await dispatch(left)
            if collector.full:
                everything.set()

        async def dispatch(jobs: Sequence[Job]) -> None:
            if jobs:
                workers = await self._able()
                for number, worker in enumerate(workers):
                    if share := jobs[number :: len(workers)]:
                        followers.append(asyncio.create_task(follow(worker, worker.actor, share)))

        followers: list[asyncio.Task[Any]] = []
        everything = asyncio.Event()
        if collector.full:
            everything.set()
        watching: asyncio.Task[Any] = asyncio.create_task(everything.wait())
        try:
            await dispatch(jobs)
            while not everything.is_set():
                done, _ = await asyncio.wait([watching, *followers], return_when=asyncio.FIRST_COMPLETED)
                for task in done - {watching}:
                    followers.remove(task)
                    task.result()
        finally:
            for task in [watching, *followers]:
                task.cancel()
        if collector.cut:
            await self._of_all(lambda worker, actor: actor.stop.remote())
        lost, self._lost = self._lost, 0
        return lost

    def _patience(self, episodes: int) -> float | None:
        """Seconds that so many episodes may take one worker; their own deadlines end them before."""
        agent = self._ctx.config.agent
        if self._ctx.config.sandbox.clock == "model":
            return None  # in lockstep, which knows no deadline
        return math.ceil(episodes / agent.concurrency) * agent.deadline_seconds + GRACE_SECONDS

    # ---------------------------------------------------------------------------------------------------------- workers

    @property
    def living(self) -> list[WorkerSlot]:
        return [worker for worker in self.workers if worker.actor is not None]

    async def _able(self) -> list[WorkerSlot]:
        """Those that can play; waits for one where there is none."""
        while not self.living:
            opening = [worker.opening for worker in self.workers if worker.opening is not None]
            if not opening:
                raise TryAgain("no rollout worker is left")
            done, _ = await asyncio.wait(opening, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return self.living

    async def _of_all(self, call: Callable[[WorkerSlot, Any], Awaitable[Any]]) -> None:
        """Has all living workers do it; loses those that do not."""

        async def one(worker: WorkerSlot, actor: Any) -> None:
            try:
                async with asyncio.timeout(OPENING_SECONDS):
                    with self._losses():
                        await call(worker, actor)
            except (TimeoutError, Lost) as error:
                self.lose(worker, actor, error)

        await asyncio.gather(*(one(worker, worker.actor) for worker in self.living))

    def lose(self, worker: WorkerSlot, actor: Any, error: BaseException) -> None:
        """Makes a new one in its place, in the background.  ``TryAgain`` when that goes on; what another worker would
        not do better either is raised again."""
        if worker.actor is not actor:
            return  # that is known
        if not isinstance(error, TimeoutError | Lost):
            try:
                with self._losses():
                    raise error
            except (TimeoutError, Lost) as lost:
                error = lost
        worker.actor = None
        self._ray.kill(actor)
        self._lost += 1
        why = str(error).splitlines()[0] if str(error) else "it took too long"
        self._ctx.tracker.note(f"rollout worker {worker.number} was lost: {why[:200]}")
        if self._lost > LOSSES * len(self.workers):
            raise TryAgain(f"{self._lost} rollout workers were lost one after the other, the last one: {error}")
        worker.opening = asyncio.create_task(self._open(worker))

    async def _open(self, worker: WorkerSlot) -> None:
        """Makes the worker that belongs into this place; it has the newest weights when it begins to play."""
        places, worker.has, worker.received = self._places, None, False
        options = on_bundle(self._group, self._first + worker.number, places.worker_cpus, places.worker_gpus)
        made = self._ray.remote(cast(Any, RolloutWorker)).options(**options)
        actor = made.remote(_share(self._site, worker.number), self._budget, self._inputs)
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                with self._losses():
                    await actor.open.remote()
            while self._newest is not None and self._served is not None and worker.has != self._served[:2]:
                newer = self._newer
                if (served := await self._newest(self._served)) is None:
                    await newer.wait()
                    continue
                async with asyncio.timeout(OPENING_SECONDS):
                    with self._losses():
                        await self._give(worker, actor, served)
        except (TimeoutError, Lost) as error:
            worker.actor, worker.opening = actor, None
            self.lose(worker, actor, error)
            await worker.opening  # type: ignore[misc]
            return
        worker.actor, worker.opening = actor, None

    async def serve(self, served: Served) -> None:
        """All play with it from now on, turns under way excepted."""
        self._served, newer, self._newer = served, self._newer, asyncio.Event()
        newer.set()
        await self._of_all(lambda worker, actor: self._give(worker, actor, served))

    async def _give(self, worker: WorkerSlot, actor: Any, served: Served) -> None:
        await actor.serve.remote(served.version, None if worker.received else served.weights, served.digest)
        worker.has, worker.received = served[:2], False

    @contextmanager
    def _losses(self) -> Iterator[None]:
        """``Lost`` for what another worker may do better; what else was raised in one, as it was."""
        try:
            yield
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, (EngineError, TryAgain)):
                raise Lost(str(error.cause)) from error
            raise (error.cause if isinstance(error.cause, Exception) else error) from error
        except self._ray.exceptions.RayError as error:
            raise_if_init_failed(error)
            raise Lost(f"{type(error).__name__} {error}") from error

    # --------------------------------------------------------------------------------------------------- begin and end

    async def open(self) -> None:
        """Begins with all workers at once; returns when they can play."""
        for worker in self.workers:
            worker.opening = asyncio.create_task(self._open(worker))
        await asyncio.gather(*(worker.opening for worker in self.workers if worker.opening is not None))

    async def close(self) -> None:
        for worker in self.workers:
            if worker.opening is not None:
                worker.opening.cancel()
        await end_actors([worker.actor for worker in self.living])


async def end_actors(actors: Sequence[Any]) -> None:
    """All at once, and those that do not end by themselves all the same."""
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
async def open_places(ctx: StageContext, trainers: int) -> AsyncIterator[Any]:
    """A placement group: so many bundles for a trainer, then one for each rollout worker.  ``BadConfiguration`` when
    this machine cannot hold what is asked for, ``TryAgain`` when a cluster does not."""
    places, servers = ctx.config.ray, ctx.config.policy.vllm.servers
    if servers and len(servers) < places.workers:
        raise BadConfiguration(f"ray.workers is {places.workers}, and policy.vllm.servers has {len(servers)} for them")
    bundles = [{"CPU": places.trainer_cpus, "GPU": places.trainer_gpus}] * trainers
    bundles += [{"CPU": places.worker_cpus, "GPU": places.worker_gpus}] * places.workers
    bundles = [{name: count for name, count in bundle.items() if count} or {"CPU": 0.01} for bundle in bundles]
    gpus = math.ceil(sum(bundle.get("GPU", 0.0) for bundle in bundles))
    if places.address is None and gpus > (here := _gpus()):
        asked = "ray.worker_gpus and ray.trainer_gpus add" if trainers else "ray.worker_gpus adds"
        raise BadConfiguration(f"{asked} up to {gpus}, and this machine has {here}")
    cpus = sum(bundle.get("CPU", 0.0) for bundle in bundles)
    weights = sum(path.stat().st_size for path in ctx.inputs["policy"].rglob("*") if path.is_file())
    with open_ray(places.address, math.ceil(cpus), gpus, 3 * weights):
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
async def open_players(ctx: StageContext, budget: EpisodeBudget) -> AsyncIterator[RayPlayers]:
    """Rollout workers that play the stage's policy as it is.  As ``open_places``."""
    async with open_places(ctx, 0) as group:
        players = RayPlayers(ctx, budget, group, 0)
        try:
            await players.open()
            yield players
        finally:
            await players.close()


def _share(site: WorkerContext, worker: int) -> WorkerContext:
    """With this worker's share of the vLLM servers that others run: each changes the weights of its own."""
    config = site.config
    vllm = config.policy.vllm.model_copy(update={"servers": config.policy.vllm.servers[worker :: config.ray.workers]})
    policy = config.policy.model_copy(update={"vllm": vllm})
    return replace(site, config=config.model_copy(update={"policy": policy}))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
