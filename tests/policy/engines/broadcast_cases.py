"""A process that takes broadcast weights and serves them with an engine of its own."""

import asyncio
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from cuda_agent.policy.engines.broadcast import Member, load_weights, weights_of
from cuda_agent.policy.engines.engine import Completion, SamplingParams
from cuda_agent.policy.engines.local import LocalEngine
from cuda_agent.policy.model import load_model

PROMPTS = [[(31 * i + 7 * j) % 256 for j in range(12)] for i in range(4)]


def serve(pipe: Connection, folder: Path, device: str) -> None:
    """Answers (method, arguments) with its result or the exception, until the pipe ends."""
    torch.set_num_threads(1)
    worker = Worker(folder, device)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(worker, method)(*arguments)
        except Exception as error:
            answer = error
        pipe.send(answer)


class Worker:
    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.model = load_model(folder).to(device)
        self.engine = LocalEngine(self.model, threads=1, batch=4, device=device)
        self.loop = asyncio.new_event_loop()
        self.member: Any = None
        self.taken: Any = None

    def reset(self) -> str:
        """Serves what it began with."""
        self.taken = weights_of(load_model(self.folder))
        return self.take(None)

    def join(self, *where: Any) -> str:
        self.member = Member(*where, self.device)
        return "joined"

    def receive(self, forms: Any) -> str:
        self.taken = self.member.receive(forms)
        return "received"

    def skip(self) -> str:
        """As if it had received: it has what it had."""
        self.taken = weights_of(self.model)
        return "skipped"

    def take(self, expected: str | None) -> str:
        """Has the engine serve what was taken."""
        load_weights(self.model, self.taken, expected)
        self.loop.run_until_complete(self.engine.update_from(self.model, self.engine.version + 1))
        return "serving"

    def play(self) -> list[Completion]:
        async def script() -> list[Completion]:
            jobs = (self.engine.generate(prompt, SamplingParams(24, seed=i)) for i, prompt in enumerate(PROMPTS))
            return list(await asyncio.gather(*jobs))

        return self.loop.run_until_complete(script())
