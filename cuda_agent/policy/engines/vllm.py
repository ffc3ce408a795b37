"""Defines ``VllmEngine``, which serves a policy with one or more vLLM servers over HTTP (docs/engines.md).

All turns of an episode (one attempt at a task) go to one server, which caches the episode's tokens. The engine does not
restart a server that dies, but sends the server's requests to other servers. Up to rounding, this does not change
completions, because a completion depends only on the weights, the prompt and the sampling parameters. Weights are
replaced while no request runs. Then a fixed prompt is sent to every server, to check that the server uses the new
weights."""

import asyncio
import contextlib
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cuda_agent.config import PolicyConfig
from cuda_agent.errors import BadConfiguration
from cuda_agent.machine import gpus
from cuda_agent.policy.engines.engine import (
    Completion,
    EngineError,
    EngineLost,
    SamplingParams,
    fitted,
    logprobs_of,
    probe_prompt,
)
from cuda_agent.policy.engines.vllm_plugin import digest
from cuda_agent.policy.engines.vllm_pool import FIRST
from cuda_agent.policy.engines.vllm_server import HEALTH_SECONDS, Busy, Fault, Replica, VllmServer
from cuda_agent.policy.engines.vllm_weights import Broadcast
from cuda_agent.policy.lora import merged_parameters, save_adapter, save_merged

SHARED = "CUDA_AGENT_ENGINE_FOLDER"  # folder for new weights that the servers can read

TRIES = 3  # tries of one request at one server
PAUSE_SECONDS = 0.25  # pause before the second try, and half of the pause before the third
BUSY_TRIES = 40
BUSY_SECONDS = 8.0  # longest pause for a busy server
PROBE_TOKENS, PROBE_SAMPLED, PROBE_TEMPERATURE = 24, 16, 0.7
PROBE_TOLERANCE = {"float32": 1e-4}  # mean difference of sampled tokens' log-probabilities
PROBE_TOLERANCE_LOW = 0.05  # the same for servers in bfloat16 and float16


class VllmEngine:
    """An engine that sends requests to the vLLM servers ``replicas``. Call ``Replica.greet`` for each server before you
    create the engine. New weights are broadcast, or written to the folder ``work``, which every server must be able to
    read."""

    def __init__(self, replicas: Sequence[Replica], work: Path, config: PolicyConfig) -> None:
        import torch

        self.version = 0
        self.context = min(replica.context for replica in replicas)  # most tokens of prompt and completion together
        self._replicas = list(replicas)
        self._work, self._sync = work, config.vllm.sync
        self._salt = uuid.uuid4().hex  # unique per engine, so that versions of two engines differ
        self._adapter: str | None = None
        self._last_error = ""  # error of the server that was lost last
        self._written: Path | None = None  # folder of the served weights
        self._broadcast = Broadcast()
        self._homes: dict[str, Replica] = {}
        self._underway = 0
        self._idle, self._open = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._open.set()
        self._updating = asyncio.Lock()
        self._failure: BaseException | None = None
        self._old: tuple[str, list[float]] | None = None  # the trainer's digest and probe at the last change
        self._worker = ThreadPoolExecutor(1, "training", initializer=torch.set_num_threads, initargs=(config.threads,))

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        """Samples a completion that ends at a stop token, after ``max_tokens``, or where the context is full. Raises
        ``ValueError`` if the prompt is empty or fills the context, and ``EngineLost`` if no server is left."""
        params = fitted(params, prompt, self.context)
        while not self._open.is_set():
            await self._open.wait()
        self._underway += 1
        self._idle.clear()
        try:
            while True:
                replica = self._home(params.key)
                try:
                    choice = await self._patiently(replica, prompt, params)
                except Fault as error:
                    self._drop(replica, error)
                    continue
                logprobs = [min(float(value), 0.0) for value in choice["logprobs"]["token_logprobs"]]
                return Completion(choice["token_ids"], logprobs, self.version, choice["finish_reason"])
        finally:
            self._underway -= 1
            if not self._underway:
                self._idle.set()

    async def update_from(self, model: Any, version: int) -> None:
        """Makes the servers serve ``model``'s weights as ``version``, after running requests have finished. Raises
        ``EngineError`` if a server does not serve these weights, and ``EngineLost`` if no server is left."""
        async with self._updating:
            self._check()
            self._open.clear()
            try:
                await self._idle.wait()
                await self._exchange(version, model)
            except BaseException as error:
                self._failure = error  # never continue with wrong weights
                raise
            finally:
                self._open.set()

    async def verify(self, model: Any) -> None:
        """Checks that every server serves the weights of ``model``. Raises EngineError otherwise."""
        await self._each(lambda replica: self._prove(replica, model, []))
        self._old = await self.compute(lambda: _fingerprint(model))

    async def compute(self, job: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._worker, job)

    async def close(self) -> None:
        """Closes the connections. Removes the engine's LoRA adapter, if any, from servers that this process did not
        start. Does not stop the servers."""
        self._failure = self._failure or EngineError("the engine is closed")
        if self._adapter:
            for replica in self._replicas:
                if replica.alive and replica.server is None:
                    with contextlib.suppress(Fault, EngineError, TimeoutError):
                        async with asyncio.timeout(HEALTH_SECONDS):
                            await replica.ask("/v1/unload_lora_adapter", {"lora_name": self._adapter})
        for replica in self._replicas:
            await replica.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    # Requests

    def _home(self, key: str) -> Replica:
        self._check()
        alive = self._alive()
        home = self._homes.get(key)
        if home is None or not home.alive:
            home = min(alive, key=lambda replica: replica.episodes)
            home.episodes += 1
            if key:
                self._homes[key] = home
        return home

    def _check(self) -> None:
        if self._failure:
            kind = EngineLost if isinstance(self._failure, EngineLost) else EngineError
            raise kind(f"the engine has failed: {self._failure}") from self._failure

    def _alive(self) -> list[Replica]:
        alive = [replica for replica in self._replicas if replica.alive]
        if not alive:
            raise EngineLost(f"none of {len(self._replicas)} vLLM servers is left: {self._last_error}")
        return alive

    def _drop(self, replica: Replica, error: Exception) -> None:
        if replica.alive:
            replica.alive = False
            log = f"\n{replica.server.tail()}" if replica.server else ""
            self._last_error = f"{replica.url}: {error}{log}"

    async def _patiently(self, replica: Replica, prompt: Sequence[int], params: SamplingParams) -> dict[str, Any]:
        """Returns a completion from ``replica``, and repeats failed requests. Makes up to ``BUSY_TRIES`` tries if the
        server answers that it is overloaded, and up to ``TRIES`` after other failures, while the server is healthy.
        Raises ``Fault`` if no try succeeds."""
        faults = busy = 0
        while True:
            try:
                model = self._adapter or replica.model
                return await replica.complete(prompt, params, model, f"{self._salt}-{self.version}")
            except Busy:
                busy += 1
                if busy == BUSY_TRIES:
                    raise
            except Fault:
                faults += 1
                if faults == TRIES or not await replica.healthy():
                    raise
            await asyncio.sleep(min(PAUSE_SECONDS * 2.0 ** (faults + busy - 1), BUSY_SECONDS))

    # Weights

    async def _exchange(self, version: int, model: Any) -> None:
        for replica in self._replicas:  # a server that answers again gets the new weights too
            if not replica.alive and replica.server is None and await replica.healthy():
                with contextlib.suppress(Fault):
                    await replica.greet()
                    replica.alive = True
        folder: Path | None = None
        if self._sync != "nccl":
            folder = self._work / "weights" / f"{version}-{uuid.uuid4().hex[:8]}"
            save = save_adapter if self._sync == "lora" else save_merged
            await self.compute(lambda: save(model, folder))
        before = await self._each(lambda replica: replica.call("cuda_agent_weights"))
        await self._each(lambda replica: replica.ask("/pause?mode=wait", {}))
        try:
            await self._send(version, model, folder)
        finally:
            await self._each(lambda replica: replica.ask("/resume", {}))
        self.version = version  # also part of the probe's salt
        await self._each(lambda replica: self._prove(replica, model, before.get(replica, [])))
        self._old = await self.compute(lambda: _fingerprint(model))
        self._homes.clear()
        for replica in self._replicas:
            replica.episodes = 0
        if self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)
        self._written = folder

    async def _send(self, version: int, model: Any, folder: Path | None) -> None:
        if self._sync == "disk":
            await self._each(lambda replica: replica.call("cuda_agent_load", folder=str(folder)))
        elif self._sync == "nccl":
            try:
                await self._broadcast.send(self._alive(), model)
            except Fault:  # a dead server ended the group; the others can join a new one
                for replica in self._alive():
                    if not await replica.healthy():
                        self._drop(replica, EngineError("lost while weights were broadcast"))
                await self._broadcast.send(self._alive(), model)
        else:
            name = f"{self._salt}-{version}-{uuid.uuid4().hex[:8]}"

            async def exchange(replica: Replica) -> None:
                await replica.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
                for old in [model["id"] for model in (await replica.ask("/v1/models"))["data"]]:
                    if old.startswith(self._salt) and old != name:
                        await replica.ask("/v1/unload_lora_adapter", {"lora_name": old})

            await self._each(exchange)
            self._adapter = name

    async def _prove(self, replica: Replica, model: Any, before: list[Any]) -> None:
        """Checks that ``replica`` computes with the weights of ``model``. Raises EngineError otherwise. ``before``
        holds digests of the weights in the server's workers before an update, or nothing. If ``model`` has changed
        since the last check, these digests must have changed, too, except with LoRA adapters."""
        prompt = probe_prompt(model, PROBE_TOKENS)
        params = SamplingParams(PROBE_SAMPLED, seed=1, temperature=PROBE_TEMPERATURE)
        served_name = self._adapter or replica.model
        choice = await replica.complete(prompt, params, served_name, uuid.uuid4().hex, prompt_logprobs=0)
        ids = choice["token_ids"]
        try:
            entries = zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)
            served = [float(entry[str(token)]["logprob"]) for entry, token in entries]
        except (KeyError, TypeError, ValueError) as error:
            raise Fault(f"no log-probabilities of the prompt: {type(error).__name__} {error}") from error
        trainer, wanted = await self.compute(lambda: _fingerprint(model))
        sampled = await self.compute(lambda: logprobs_of(model, [*prompt, *ids], len(ids), PROBE_TEMPERATURE))
        difference = _distance(choice["logprobs"]["token_logprobs"], sampled) / len(ids)
        tolerance = PROBE_TOLERANCE.get(replica.dtype, PROBE_TOLERANCE_LOW)
        if not difference <= tolerance:
            raise EngineError(
                f"{replica.url} does not serve the weights it was given: log-probabilities of its samples differ from "
                f"the trainer's by {difference:.2e} on average (allowed: {tolerance})"
            )
        off = _distance(served, wanted)
        if self._old is not None and self._old[0] != trainer:
            moved = _distance(wanted, self._old[1])
            if _distance(served, self._old[1]) < off and moved > 4 * replica.noise:
                raise EngineError(f"{replica.url} still serves the weights before these: its probe is off by {off:.2e}")
            if before and self._sync != "lora" and before == await replica.call("cuda_agent_weights"):
                raise EngineError(f"{replica.url} has not changed its weights, and the trainer has")
        replica.noise = off

    async def _each(self, action: Callable[[Replica], Awaitable[Any]]) -> dict[Replica, Any]:
        """Runs ``action`` on every living server; drops servers that fail. Raises EngineLost if no server is left."""
        results: dict[Replica, Any] = {}

        async def one(replica: Replica) -> None:
            try:
                results[replica] = await action(replica)
            except Fault as error:
                self._drop(replica, error)

        await asyncio.gather(*(one(replica) for replica in self._alive()))
        self._alive()
        return results


def _put_first(policy: Path, shared: Path) -> None:
    """Copies the folder ``policy`` to the sub-folder ``FIRST`` of ``shared``. On a cluster, a run's vLLM servers wait
    for this sub-folder and then load it (see ``vllm_pool.py``). Does nothing if the sub-folder exists."""
    if (shared / FIRST).exists():
        return
    shared.mkdir(parents=True, exist_ok=True)
    made = shared / f"{FIRST}-{uuid.uuid4().hex[:8]}"
    shutil.copytree(policy, made)
    try:
        made.rename(shared / FIRST)
    except OSError:  # another worker was first
        shutil.rmtree(made)


def _fingerprint(model: Any) -> tuple[str, list[float]]:
    prompt = probe_prompt(model, PROBE_TOKENS)
    return digest(merged_parameters(model)), logprobs_of(model, prompt, len(prompt) - 1, 1.0)


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True))


@asynccontextmanager
async def open_vllm(
    folder: Path, model: Any, work: Path, config: PolicyConfig, lease: Path | None = None
) -> AsyncIterator[VllmEngine]:
    """Opens an engine that serves the policy in ``folder``. ``model`` is the same policy in memory.

    If ``config.vllm.servers`` is empty, starts ``config.vllm.replicas`` servers and spreads them over the GPUs. Without
    a GPU the servers run on the CPU in float32. If ``lease``, the folder of the timing lease, is given, they pause
    while another process times a kernel.

    If ``config.vllm.servers`` lists servers, sends them the weights. If ``config.vllm.sync`` is ``lora``, sends no
    weights here: the servers must already serve this policy. New weights are written below ``work``, unless they are
    broadcast. For listed servers, the folder in ``$CUDA_AGENT_ENGINE_FOLDER``, if set, replaces ``work``, and the
    policy is copied there for servers that wait for it.

    Raises:
        PolicyError: vLLM is not installed.
        EngineLost: A server does not start or answer.
        EngineError: A server does not serve this policy.
        BadConfiguration: A server takes shorter sequences than ``policy.context``."""
    settings = config.vllm
    own: list[VllmServer] = []
    found = [Replica(url) for url in settings.servers]
    engine: VllmEngine | None = None
    try:
        if not settings.servers:
            devices = gpus()
            for index in range(settings.replicas):
                device = devices - 1 - index % devices if devices else None  # the trainer uses the first GPU
                own.append(VllmServer(folder, config, None if devices else lease, device))
            found = [Replica(f"unix:{server.socket}", server) for server in own]
        elif shared := os.environ.get(SHARED):
            work = Path(shared)
            await asyncio.to_thread(_put_first, folder, work)
        if own or SHARED in os.environ:
            await asyncio.gather(*(replica.ready() for replica in found))
        try:
            await asyncio.gather(*(replica.greet() for replica in found))
        except Fault as error:
            raise EngineLost(f"a vLLM server does not answer: {error}") from error
        engine = VllmEngine(found, work, config)
        if engine.context < config.context:
            raise BadConfiguration(f"policy.context={config.context}: the servers have {engine.context} positions.")
        if settings.servers and settings.sync != "lora":
            await engine.update_from(model, 0)
        else:
            await engine.verify(model)
        yield engine
    finally:
        await (engine.close() if engine else asyncio.gather(*(replica.close() for replica in found)))
        for server in own:
            server.process.terminate()
        for server in own:
            server.close()
