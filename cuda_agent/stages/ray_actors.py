"""What runs in Ray's actors: a rollout worker, which plays episodes with an engine and a sandbox of its own, and the
trainer.  Plain classes; ``ray_runtime`` makes actors of them, and nothing here imports Ray.

What they are given and give back travels as bytes, lines and arrays, so they need no folder in common with the stage:
folders as {path: bytes}, episodes in their wire form, weights as {name: array}, or broadcast, with a digest that must
hold after they were loaded.
"""

import asyncio
import ctypes
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cuda_agent.config import Ppo
from cuda_agent.policy.broadcast import Form, Member, Weights, forms_of, load_weights, place, weights_of
from cuda_agent.policy.episode import from_line, to_line
from cuda_agent.policy.lora import merged_parameters
from cuda_agent.policy.vllm_plugin import digest
from cuda_agent.sandbox.scratch import make_folder, remove
from cuda_agent.stages.context import Site
from cuda_agent.stages.rollouts import Job, Kind, Rollouts, open_rollouts

Files = dict[str, bytes]  # of a folder, by path


class RolloutWorker:
    """Plays episodes.  ``site`` knows the stage's cache, which is used where this machine has the place for it; folders
    of ``inputs`` are unpacked here."""

    def __init__(self, site: Site, settings: Ppo, inputs: Mapping[str, Files]) -> None:
        _end_with_parent()
        self._stack = AsyncExitStack()
        self._site = _settle(site, inputs, self._stack)
        self._settings = settings
        self._rollouts: Rollouts | None = None
        self._playing: dict[int, asyncio.Task[Any]] = {}
        self._member: Member | None = None
        self._received: Weights | None = None  # and not served yet

    async def open(self) -> int:
        """Opens engine and sandbox; the process id."""
        agent = self._site.config.agent
        self._rollouts = await self._stack.enter_async_context(
            open_rollouts(
                self._site,
                self._site.inputs["policy"],
                turns=agent.turns,
                context=self._settings.context,
                temperature=agent.temperature,
            )
        )
        return os.getpid()

    async def play(self, step: int, jobs: Sequence[Job], kind: Kind) -> AsyncIterator[str]:
        """The episodes of ``jobs`` as they finish, until ``stop``."""
        assert self._rollouts is not None, "open comes first"
        finished: asyncio.Queue[str | None] = asyncio.Queue()
        playing = asyncio.create_task(
            self._rollouts.play(jobs, kind, lambda episode: finished.put_nowait(to_line(episode)))
        )
        playing.add_done_callback(lambda task: finished.put_nowait(None))
        self._playing[id(playing)] = playing
        try:
            while (line := await finished.get()) is not None:
                yield line
            if not playing.cancelled():
                playing.result()  # what went wrong
        finally:
            playing.cancel()
            del self._playing[id(playing)]

    async def stop(self) -> None:
        """Ends all that is being played."""
        for playing in self._playing.values():
            playing.cancel()

    def place(self) -> str:
        assert self._rollouts is not None, "open comes first"
        return place(self._rollouts.model.device)

    async def join(self, host: str, port: int, rank: int, size: int, device: str) -> None:
        """Takes part in broadcasts from now on.  ``TransferError``, as from ``receive``."""
        if self._member is not None:
            self._member.leave()
        self._member = await asyncio.to_thread(Member, host, port, rank, size, device)

    async def receive(self, forms: Sequence[Form]) -> None:
        """Takes weights that are broadcast, beside those that it plays with."""
        assert self._member is not None, "join comes first"
        self._received = await asyncio.to_thread(self._member.receive, forms)

    async def serve(self, version: int, weights: Weights | None, expected: str) -> None:
        """Plays with these weights, or with those that it received, from now on; turns under way finish on the old
        ones.  ``EngineError`` when the model that was made of them has another digest than the trainer's."""
        assert self._rollouts is not None, "open comes first"
        rollouts = self._rollouts
        given, self._received = weights or self._received, None
        assert given is not None, "receive comes first"
        await rollouts.engine.compute(lambda: load_weights(rollouts.model, given, expected))
        await rollouts.engine.update_from(rollouts.model, version)

    async def close(self) -> None:
        await self.stop()
        await self._stack.aclose()


class Trainer:
    """Learns.  ``make_critic`` is given the unpacked ``inputs``."""

    def __init__(self, site: Site, settings: Ppo, inputs: Mapping[str, Files], make_critic: Any) -> None:
        _end_with_parent()
        from cuda_agent.policy.model import load_model
        from cuda_agent.stages.learning import Learner, shared_training

        self._stack = ExitStack()
        site = self._stack.enter_context(shared_training(_settle(site, inputs, self._stack)))
        self._learner = Learner(site, settings, load_model(site.inputs["policy"]), make_critic(site.inputs))
        self._member: Member | None = None

    def pid(self) -> int:
        return os.getpid()

    def update(self, step: int, lines: Sequence[str]) -> dict[str, float]:
        return self._learner.update(step, [from_line(line) for line in lines])

    def weights(self, expected: str | None = None) -> Weights | None:
        """Nothing when their digest is not the ``expected``: it has learnt since."""
        model = self._learner.actor.model
        if expected is not None and digest(merged_parameters(model)) != expected:
            return None
        return weights_of(model)

    def digest(self) -> str:
        return digest(merged_parameters(self._learner.actor.model))

    def forms(self) -> list[Form]:
        return forms_of(self._learner.actor.model)

    def place(self) -> str:
        """Where its weights can be sent from: they are brought to its GPU, where it has one."""
        import torch

        return place(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def join(self, host: str, port: int, rank: int, size: int, device: str) -> None:
        """As a rollout worker's.  It sends."""
        if self._member is not None:
            self._member.leave()
        self._member = Member(host, port, rank, size, device)

    def send(self) -> None:
        assert self._member is not None, "join comes first"
        self._member.send(merged_parameters(self._learner.actor.model))

    def critic(self) -> Weights:
        return weights_of(self._learner.critic.model)

    def save(self) -> Files:
        with TemporaryDirectory() as folder:
            self._learner.save(Path(folder))
            return pack(Path(folder))

    def load(self, files: Files) -> None:
        with TemporaryDirectory() as folder:
            unpack(files, Path(folder))
            self._learner.load(Path(folder))

    def close(self) -> None:
        self._stack.close()


def pack(folder: Path) -> Files:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def unpack(files: Files, folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _settle(site: Site, inputs: Mapping[str, Files], stack: ExitStack | AsyncExitStack) -> Site:
    """``site`` with folders of this process's own, which go when ``stack`` is closed."""
    home = make_folder("actor")
    home.chmod(0o700)
    stack.callback(remove, home)
    for name, files in inputs.items():
        unpack(files, home / name)
    (home / "work").mkdir()
    return replace(site, inputs={name: home / name for name in inputs}, work=home / "work")


def _end_with_parent() -> None:
    """Ray's workers outlive a raylet that is killed by seconds, and would go on computing."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
