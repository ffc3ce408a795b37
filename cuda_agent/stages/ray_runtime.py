"""The runtime of Ray's actors: rollout workers and a trainer, placed together.

A worker that is lost, or whose engine is, loses what it was playing: the others play it again, with the same seeds, and
a new worker takes its place.  The trainer, when it is lost, begins anew from the newest checkpoint.  Weights go from
the trainer to the workers once a step, through Ray's object store or by a broadcast; a worker that comes late is given
the newest, as is one that a broadcast did not reach.

Not here: the loop (``learning``), the trainer's actor (``ray_trainer``), what the actors do (``ray_actors``), a
broadcast's group (``ray_broadcast``), and Ray's own processes (``ray_cluster``).
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from cuda_agent.config import Ppo
from cuda_agent.config import Ray as Places
from cuda_agent.policy.broadcast import TransferError
from cuda_agent.policy.engine import EngineError
from cuda_agent.policy.episode import Episode, from_line
from cuda_agent.stages.context import BadConfiguration, Site, StageContext, TryAgain
from cuda_agent.stages.learning import MakeCritic, Played
from cuda_agent.stages.ray_actors import RolloutWorker, pack
from cuda_agent.stages.ray_broadcast import Circle
from cuda_agent.stages.ray_cluster import on_bundle, open_ray, unless_born_dead
from cuda_agent.stages.ray_trainer import RemoteTrainer
from cuda_agent.stages.rollouts import Job, Kind, episodes_of
from cuda_agent.tasks.task import Task
from cuda_agent.training.critic import Critic

LOSSES = 3  # of workers in one step, times their number, until the stage gives up
PLACING_SECONDS = 900.0  # a cluster may have to start machines
OPENING_SECONDS = 1800.0  # a worker's engine may have to load a large model
CLOSING_SECONDS = 20.0
BROADCASTS = 2  # of the same weights, each to those that are left; then they go through the object store
GRACE_SECONDS = 60.0  # beyond the deadlines of a worker's episodes
Result = TypeVar("Result")


class _Served(NamedTuple):
    """What the workers play with.  ``weights``: where Ray keeps them, if it does."""

    version: int
    digest: str
    weights: Any


class _Lost(Exception):
    """An actor, or the engine in it, is gone or serves no more."""


class _Worker:
    """A rollout worker's place, and who is in it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.actor: Any = None  # none: lost, or not opened yet
        self.opening: asyncio.Task[None] | None = None
        self.has: tuple[int, str] | None = None  # version and digest of the weights that it plays with
        self.received = False  # the newest, by broadcast, and does not play with them yet


class Harvest:
    """The episodes of one step as they come in.  Of every task the first to finish with a reward are kept, ``samples``
    for each time that it was drawn, or, where fewer have one, all; it is ``full`` when every task has them.  A task
    that was drawn twice has the same episodes twice, as in one process."""

    def __init__(self, jobs: Sequence[Job], tasks: Sequence[Task], samples: int) -> None:
        self._jobs = jobs
        self._wanted = {name: count * samples for name, count in Counter(task.name for task in tasks).items()}
        self._open = Counter(task.name for task, _ in jobs)  # of each task, not finished yet
        self._kept: dict[str, list[Episode]] = {name: [] for name in self._wanted}

    def add(self, episode: Episode) -> None:
        self._open[episode.task] -= 1
        self._kept[episode.task].append(episode)

    @property
    def full(self) -> bool:
        return all(not self._open[task] or len(self._rewarded(task)) >= self._wanted[task] for task in self._wanted)

    @property
    def cut(self) -> int:
        """How many were begun and are not waited for."""
        return self._open.total()

    def episodes(self) -> list[Episode]:
        """In the order of the jobs, whatever the order they came in."""
        places: dict[str, list[int]] = {}
        for index, (_, name) in enumerate(self._jobs):
            places.setdefault(name, []).append(index)
        chosen = []
        for task, episodes in self._kept.items():
            others = [episode for episode in episodes if episode.reward is None]
            chosen += [*self._rewarded(task), *others][: self._wanted[task]]
        placed = [(places[episode.id].pop(0), episode) for episode in chosen]
        return [episode for _, episode in sorted(placed, key=lambda item: item[0])]

    def _rewarded(self, task: str) -> list[Episode]:
        return [episode for episode in self._kept[task] if episode.reward is not None]


class RayRuntime:
    """See ``learning.Runtime``.  Its methods, ``play`` excepted, are called one after the other."""

    def __init__(self, ctx: StageContext, settings: Ppo, kind: Kind, make_critic: MakeCritic, group: Any) -> None:
        import ray

        self._ray = ray
        self._ctx, self._settings, self._kind = ctx, settings, kind
        self._group = group
        self._places: Places = ctx.config.ray
        self._site = Site(ctx.name, ctx.config, {}, Path(), ctx.cache.absolute())
        self._to_play = ray.put({name: pack(ctx.inputs[name]) for name in ("policy", "tasks")})
        self._trainer = RemoteTrainer(ctx, self._site, settings, make_critic, group)
        self._workers = [_Worker(number) for number in range(self._places.workers)]
        self._served: _Served | None = None
        self._newer = asyncio.Event()  # of that which is served now: there is something newer
        self._circle = Circle(self._ray.util.get_node_ip_address())
        self._lost = 0  # workers, since a step was last played to its end

    # ---------------------------------------------------------------------------------------------------------- playing

    async def play(self, step: int, tasks: Sequence[Task]) -> Played:
        began = time.monotonic()
        samples = self._settings.samples
        extra = math.ceil(self._places.oversample * samples)
        jobs = episodes_of(tasks, samples + extra, f"{self._ctx.name}/{step}")
        harvest = Harvest(jobs, tasks, samples)

        async def follow(worker: _Worker, actor: Any, share: Sequence[Job]) -> None:
            left = list(share)
            try:
                async with asyncio.timeout(self._patience(len(share))):
                    with self._losses():
                        stream = actor.play.options(num_returns="streaming").remote(step, share, self._kind)
                        async for reference in stream:
                            episode = from_line(await reference)
                            left.remove(next(job for job in left if job[1] == episode.id))
                            harvest.add(episode)
                            if harvest.full:
                                break
                if left and not harvest.full:
                    raise _Lost("it stopped playing")
            except (TimeoutError, _Lost) as error:
                self._lose(worker, actor, error)
                await deal(left)
            if harvest.full:
                everything.set()

        async def deal(jobs: Sequence[Job]) -> None:
            if jobs:
                workers = await self._living()
                for number, worker in enumerate(workers):
                    if share := jobs[number :: len(workers)]:
                        followers.append(asyncio.create_task(follow(worker, worker.actor, share)))

        followers: list[asyncio.Task[Any]] = []
        everything = asyncio.Event()
        watching: asyncio.Task[Any] = asyncio.create_task(everything.wait())
        try:
            await deal(jobs)
            while not everything.is_set():
                done, _ = await asyncio.wait([watching, *followers], return_when=asyncio.FIRST_COMPLETED)
                for task in done - {watching}:
                    followers.remove(task)
                    task.result()
        finally:
            for task in [watching, *followers]:
                task.cancel()
        if harvest.cut:
            await self._of_all(lambda worker, actor: actor.stop.remote())
        metrics = {"cut": float(harvest.cut), "workers_lost": float(self._lost)}
        self._lost = 0
        return Played(harvest.episodes(), time.monotonic() - began, metrics)

    def _patience(self, episodes: int) -> float | None:
        """Seconds that so many episodes may take one worker; their own deadlines end them before."""
        agent = self._ctx.config.agent
        if self._ctx.config.sandbox.clock == "model":
            return None  # in lockstep, which knows no deadline
        return math.ceil(episodes / agent.concurrency) * agent.deadline_seconds + GRACE_SECONDS

    # ---------------------------------------------------------------------------------------------------------- workers

    async def _living(self) -> list[_Worker]:
        """Those that can play; waits for one where there is none."""
        while not (living := [worker for worker in self._workers if worker.actor is not None]):
            opening = [worker.opening for worker in self._workers if worker.opening is not None]
            done, _ = await asyncio.wait(opening, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return living

    async def _of_all(self, call: Callable[[_Worker, Any], Awaitable[Any]]) -> None:
        """Has all living workers do it; loses those that do not."""

        async def one(worker: _Worker, actor: Any) -> None:
            try:
                async with asyncio.timeout(OPENING_SECONDS):
                    with self._losses():
                        await call(worker, actor)
            except (TimeoutError, _Lost) as error:
                self._lose(worker, actor, error)

        await asyncio.gather(*(one(worker, worker.actor) for worker in self._workers if worker.actor is not None))

    def _lose(self, worker: _Worker, actor: Any, error: BaseException) -> None:
        """Makes a new one in its place, in the background.  ``TryAgain`` when that goes on."""
        if worker.actor is not actor:
            return  # that is known
        worker.actor = None
        self._ray.kill(actor)
        self._lost += 1
        why = str(error).splitlines()[0] if str(error) else "it took too long"
        self._ctx.tracker.note(f"rollout worker {worker.number} was lost: {why[:200]}")
        if self._lost > LOSSES * len(self._workers):
            raise TryAgain(f"{self._lost} rollout workers were lost one after the other, the last one: {error}")
        worker.opening = asyncio.create_task(self._open(worker))

    async def _open(self, worker: _Worker) -> None:
        """Makes the worker that belongs into this place; it has the newest weights when it begins to play."""
        places, worker.has, worker.received = self._places, None, False
        options = on_bundle(self._group, places.trainers + worker.number, places.worker_cpus, places.worker_gpus)
        made = self._ray.remote(cast(Any, RolloutWorker)).options(**options)
        actor = made.remote(_share(self._site, worker.number), self._settings, self._to_play)
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                with self._losses():
                    await actor.open.remote()
            while self._served is not None and worker.has != self._served[:2]:
                newer = self._newer
                if (served := await self._served_weights(self._served)) is None:
                    await newer.wait()
                    continue
                async with asyncio.timeout(OPENING_SECONDS):
                    with self._losses():
                        await self._give(worker, actor, served)
        except (TimeoutError, _Lost) as error:
            worker.actor, worker.opening = actor, None
            self._lose(worker, actor, error)
            await worker.opening  # type: ignore[misc]
            return
        worker.actor, worker.opening = actor, None

    async def _give(self, worker: _Worker, actor: Any, served: _Served) -> None:
        await actor.serve.remote(served.version, None if worker.received else served.weights, served.digest)
        worker.has, worker.received = served[:2], False

    async def _served_weights(self, served: _Served) -> _Served | None:
        """``served`` with its weights; none when the trainer has learnt since, or is gone, and will serve others."""
        if served.weights is not None or self._trainer.actor is None:
            return served if served.weights is not None else None
        weights = self._trainer.actor.weights.remote(served.digest)
        try:
            return None if await weights is None else served._replace(weights=weights)
        except self._ray.exceptions.RayError:
            return None

    async def _broadcast(self) -> bool:
        """Whether all workers that lived when it began have received the trainer's weights; else none has."""
        forms = await self._trainer.of(self._trainer.actor.forms.remote())
        for _ in range(BROADCASTS):
            workers = [worker for worker in self._workers if worker.actor is not None]
            if not workers:
                return True
            actors = [worker.actor for worker in workers]
            ours, *errors = await self._circle.transfer(self._trainer.actor, actors, forms)
            for worker, actor, error in zip(workers, actors, errors, strict=True):
                if error is not None and not isinstance(error, TransferError):
                    try:
                        with self._losses():
                            raise error
                    except (TimeoutError, _Lost) as lost:
                        self._lose(worker, actor, lost)
            if isinstance(ours, TimeoutError):
                raise self._trainer.lost(ours)
            if ours is not None and not isinstance(ours, TransferError):
                await self._trainer.of(_raised(ours))
            if ours is None and not any(errors):
                for worker in workers:
                    worker.received = True
                return True
            said = [str(error) for error in (ours, *errors) if error is not None]
            self._ctx.tracker.note(f"weights could not be broadcast to {len(workers)} rollout workers: {said[0][:200]}")
        return False

    @contextmanager
    def _losses(self) -> Iterator[None]:
        """``_Lost`` for what another worker may do better; what else was raised in one, as it was."""
        try:
            yield
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, (EngineError, TryAgain)):
                raise _Lost(str(error.cause)) from error
            raise (error.cause if isinstance(error.cause, Exception) else error) from error
        except self._ray.exceptions.RayError as error:
            unless_born_dead(error)
            raise _Lost(f"{type(error).__name__} {error}") from error

    # ---------------------------------------------------------------------------------------------------------- trainer

    async def learn(self, step: int, episodes: Sequence[Episode]) -> dict[str, float]:
        return await self._trainer.learn(step, episodes)

    async def save(self, step: int) -> None:
        await self._trainer.save(step)

    async def restore(self) -> int:
        return await self._trainer.restore()

    async def result(self) -> tuple[Any, Any, Critic]:
        return await self._trainer.result()

    async def serve(self, version: int) -> None:
        digest = await self._trainer.of(self._trainer.actor.digest.remote())
        for worker in self._workers:
            worker.received = False
        served, newer, self._newer = _Served(version, digest, None), self._newer, asyncio.Event()
        broadcast = self._places.sync == "broadcast" and await self._broadcast()
        if not broadcast or any(worker.actor is not None and not worker.received for worker in self._workers):
            served = served._replace(weights=self._trainer.actor.weights.remote())  # ours, should it be lost
            await self._trainer.of(self._trainer.actor.digest.remote())  # it has made them
        self._served = served
        newer.set()
        await self._of_all(lambda worker, actor: self._give(worker, actor, served))

    # ------------------------------------------------------------------------------------------------------- both kinds

    async def open(self) -> None:
        """Begins with all of its actors at once; returns when the workers can play."""
        for worker in self._workers:
            worker.opening = asyncio.create_task(self._open(worker))
        opening = [worker.opening for worker in self._workers if worker.opening is not None]
        await asyncio.gather(self._trainer.open(), *opening)

    async def close(self) -> None:
        self._circle.end()
        actors = [worker.actor for worker in self._workers] + self._trainer.actors
        for worker in self._workers:
            if worker.opening is not None:
                worker.opening.cancel()
        closing = [asyncio.ensure_future(actor.close.remote()) for actor in actors if actor is not None]
        if closing:
            await asyncio.wait(closing, timeout=CLOSING_SECONDS)
        for future in closing:
            with suppress(Exception, asyncio.CancelledError):
                future.exception() if future.done() else future.cancel()
        for actor in actors:
            if actor is not None:
                self._ray.kill(actor)


@asynccontextmanager
async def open_ray_runtime(
    ctx: StageContext, settings: Ppo, kind: Kind, make_critic: MakeCritic
) -> AsyncIterator[RayRuntime]:
    """``BadConfiguration`` when this machine cannot hold what is asked for, ``TryAgain`` when a cluster does not."""
    places, servers = ctx.config.ray, ctx.config.policy.vllm.servers
    if servers and len(servers) < places.workers:
        raise BadConfiguration(f"ray.workers is {places.workers}, and policy.vllm.servers has {len(servers)} for them")
    bundles = [{"CPU": places.trainer_cpus, "GPU": places.trainer_gpus}] * places.trainers
    bundles += [{"CPU": places.worker_cpus, "GPU": places.worker_gpus}] * places.workers
    bundles = [{name: count for name, count in bundle.items() if count} or {"CPU": 0.01} for bundle in bundles]
    gpus = math.ceil(sum(bundle.get("GPU", 0.0) for bundle in bundles))
    if places.address is None and gpus > (here := _gpus()):
        raise BadConfiguration(f"ray.worker_gpus and ray.trainer_gpus add up to {gpus}, and this machine has {here}")
    cpus = sum(bundle.get("CPU", 0.0) for bundle in bundles)
    weights = sum(path.stat().st_size for path in ctx.inputs["policy"].rglob("*") if path.is_file())
    with open_ray(places.address, math.ceil(cpus), gpus, 3 * weights):
        from ray.util.placement_group import placement_group, remove_placement_group

        group = placement_group(bundles, strategy="SPREAD")
        runtime = RayRuntime(ctx, settings, kind, make_critic, group)
        try:
            ready, _ = await asyncio.wait([asyncio.ensure_future(group.ready())], timeout=PLACING_SECONDS)
            if not ready:
                raise TryAgain(f"Ray found no place for {bundles} within {PLACING_SECONDS:.0f} s")
            await runtime.open()
            yield runtime
        finally:
            await runtime.close()
            remove_placement_group(group)


def _share(site: Site, worker: int) -> Site:
    """With this worker's share of the vLLM servers that others run: each changes the weights of its own."""
    config = site.config
    vllm = config.policy.vllm.model_copy(update={"servers": config.policy.vllm.servers[worker :: config.ray.workers]})
    policy = config.policy.model_copy(update={"vllm": vllm})
    return replace(site, config=config.model_copy(update={"policy": policy}))


async def _raised(error: Exception) -> None:
    raise error


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
