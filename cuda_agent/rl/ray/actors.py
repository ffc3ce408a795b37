"""Defines two classes of Ray actors: ``RolloutWorker`` plays episodes, and ``RankHost`` runs trainer processes.

The actors and the process that controls them share no folder. Inputs and checkpoints are sent as parts of files,
episodes as lines of JSON, and weights as arrays. Weights come with a digest. The receiver loads the weights and then
checks the digest."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from cuda_agent.agent.loop import EpisodeSettings
from cuda_agent.context import WorkerContext
from cuda_agent.errors import BadConfiguration
from cuda_agent.machine import die_with_parent, gpus
from cuda_agent.policy.episode import to_line
from cuda_agent.rl.ray.transfer import Part, Weights, keep, load_weights, parts
from cuda_agent.rl.rollouts import Job, Kind, Rollouts, open_rollouts
from cuda_agent.sandbox.jail.scratch import make_folder, remove
from cuda_agent.training.ranks import Ranks, open_store

BEAT_SECONDS = 30.0


class RolloutWorker:
    """An actor that plays episodes with its own inference engine and sandbox. ``inputs`` maps the name of each input
    folder to the parts of its files; the actor writes them to a private folder. The path ``context.cache`` is a folder
    on the actor's machine."""

    def __init__(self, context: WorkerContext, episodes: EpisodeSettings, inputs: Mapping[str, Sequence[Part]]) -> None:
        die_with_parent()  # Ray's workers run on for seconds after their node's raylet was killed
        self._stack = AsyncExitStack()
        home = _private_folder(self._stack)
        for name, content in inputs.items():
            for part in content:
                keep(part, home / name)
        (home / "work").mkdir()
        self._context = replace(context, inputs={name: home / name for name in inputs}, work=home / "work")
        self._episodes = episodes
        self._rollouts: Rollouts | None = None
        self._playing: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        opening = open_rollouts(self._context, self._context.inputs["policy"], self._episodes)
        self._rollouts = await self._stack.enter_async_context(opening)

    async def play(self, jobs: Sequence[Job], kind: Kind) -> AsyncIterator[str]:
        """Plays ``jobs`` and yields each finished episode as a line of JSON. Yields an empty line after every
        ``BEAT_SECONDS`` without an episode, to show that the actor is alive. Ends early if ``stop`` is called."""
        assert self._rollouts is not None, "open comes first"
        finished: asyncio.Queue[str | None] = asyncio.Queue()
        work = self._rollouts.play(jobs, kind, lambda episode: finished.put_nowait(to_line(episode)))
        playing = asyncio.create_task(work)
        playing.add_done_callback(lambda task: finished.put_nowait(None))
        self._playing.add(playing)
        try:
            while True:
                try:
                    line = await asyncio.wait_for(finished.get(), BEAT_SECONDS)
                except TimeoutError:
                    line = ""
                if line is None:
                    break
                yield line
            if not playing.cancelled():
                playing.result()  # raises its error
        finally:
            playing.cancel()
            self._playing.discard(playing)

    async def stop(self) -> None:
        for playing in self._playing:
            playing.cancel()

    async def serve(self, version: int, weights: Weights, expected: str) -> None:
        """Loads ``weights`` into the engine. Turns that begin later are sampled from them; turns under way finish on
        the old weights. Raises EngineError if ``weights`` do not fit the model, or if the digest of the loaded weights
        is not ``expected``."""
        assert self._rollouts is not None, "open comes first"
        rollouts = self._rollouts
        await rollouts.engine.compute(lambda: load_weights(rollouts.model, weights, expected))
        await rollouts.engine.update_from(rollouts.model, version)

    async def close(self) -> None:
        await self.stop()
        await self._stack.aclose()


class RankHost:
    """An actor that runs the trainer's processes (ranks) on its own machine."""

    def __init__(self) -> None:
        die_with_parent()
        self._stack = ExitStack()
        home = _private_folder(self._stack)
        self._coming, self._going = home / "coming", home / "going"

    def meet(self) -> str:
        """Opens torch's TCP store, to which all ranks connect, on this machine. Returns the store's address, as
        host:port."""
        import ray

        self._store, address = open_store(ray.util.get_node_ip_address())
        return address

    def start(self, count: int, settings: Mapping[str, Any]) -> None:
        if settings["device"] == "cuda" and (here := gpus()) < count:
            raise BadConfiguration(f"training.num_processes: {count} on GPUs of each machine, and one has {here}")
        self._ranks = self._stack.enter_context(Ranks(count, **settings))

    def place(self, name: str, model: Any, options: dict[str, Any]) -> None:
        self._ranks.place(name, model, options)

    def call(self, message: bytes) -> Any:
        return self._ranks.send(message)

    def save(self, name: str) -> None:
        """Writes a checkpoint of the trainer called ``name``: the files of the ranks on this machine. ``saved`` yields
        these files and removes them."""
        shutil.rmtree(self._going, ignore_errors=True)
        self._going.mkdir()
        self._ranks.save(name, self._going)

    def saved(self) -> Iterator[Part]:
        yield from parts(self._going)
        shutil.rmtree(self._going)

    def keep(self, part: Part) -> None:
        """Writes one part of a checkpoint's files to a folder, from which ``load`` reads."""
        keep(part, self._coming)

    def load(self, name: str) -> tuple[int, float]:
        try:
            return self._ranks.load(name, self._coming)
        finally:
            shutil.rmtree(self._coming, ignore_errors=True)

    def close(self) -> None:
        self._stack.close()


def _private_folder(stack: ExitStack | AsyncExitStack) -> Path:
    home = make_folder("actor")
    home.chmod(0o700)
    stack.callback(remove, home)
    return home
