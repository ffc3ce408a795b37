"""One vLLM server over HTTP: requests, and checked answers.

A server that fails raises ``Fault``, and another may be tried; a server that refuses the request raises
``EngineError``.

What it does not cover: the choice of the server, retries, and weights (``vllm``).
"""

import asyncio
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import httpx

from cuda_agent.policy.engines.engine import EngineError, EngineLost, SamplingParams
from cuda_agent.policy.engines.vllm_server import VllmServer

KEY = "CUDA_AGENT_ENGINE_KEY"  # bearer token of external servers
REQUEST_SECONDS = 1800.0  # limit of one completion; then the server counts as dead
HEALTH_SECONDS = 10.0
START_SECONDS = 1800.0  # to load the first policy
KEPT_SECONDS = 2.0  # longest idle time of a reused connection; vLLM closes it after 5


class Fault(Exception):
    """This server failed; another may work."""


class Busy(Fault):
    """The server is overloaded."""


class Replica:
    """One server.  ``url``: ``http://host:port``, or ``unix:/path`` of a socket."""

    def __init__(self, url: str, server: VllmServer | None = None) -> None:
        self.url, self.server = url, server
        self.alive = True
        self.episodes = 0  # episodes assigned since the last change of weights
        self.model = ""  # name under which it serves the policy
        self.context = 0
        self.workers = 0
        self.dtype, self.device = "", ""
        self.noise = math.inf  # difference of its last successful probe
        key = os.environ.get(KEY) if server is None else None
        unix = url.removeprefix("unix:") if url.startswith("unix:") else None

        def client(keep: int | None) -> httpx.AsyncClient:
            limits = httpx.Limits(max_keepalive_connections=keep, keepalive_expiry=KEPT_SECONDS)
            return httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=unix, limits=limits),
                base_url="http://vllm" if unix else url.rstrip("/"),
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(REQUEST_SECONDS, connect=HEALTH_SECONDS),
            )

        self._client, self._anew = client(None), client(0)  # the second opens a new connection per request

    async def close(self) -> None:
        await self._client.aclose()
        await self._anew.aclose()

    async def healthy(self) -> bool:
        if self.server is not None and self.server.process.poll() is not None:
            return False
        try:
            return (await self._anew.get("/health", timeout=HEALTH_SECONDS)).status_code == 200
        except httpx.HTTPError:
            return False

    async def ready(self) -> None:
        """Returns when the server answers.

        Raises:
            EngineLost: It has ended or takes too long; the message has the end of its log.
        """
        end, server = time.monotonic() + START_SECONDS, self.server
        while not await self.healthy():
            log = f":\n{server.tail()}" if server else ""
            if server and server.process.poll() is not None:
                raise EngineLost(f"vLLM ended with code {server.process.returncode} at its start{log}")
            if time.monotonic() > end:
                raise EngineLost(f"{self.url}: vLLM did not answer within {START_SECONDS:.0f} s{log}")
            await asyncio.sleep(0.25)

    async def ask(self, path: str, body: Any = None) -> Any:
        """The JSON answer, None if it is empty; GET without a body.

        Raises:
            EngineError: The server refuses the request.
            Fault: The server failed.
        """
        method = "GET" if body is None else "POST"
        try:
            try:
                answer = await self._client.request(method, path, json=body)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                # The server may have closed a kept connection, with nothing said against it; hundreds after a pause.
                answer = await self._anew.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise Fault(f"{type(error).__name__} {error}".strip()) from error
        code = answer.status_code
        said = f"HTTP {code}: {answer.text[:500]}"
        if code == 429:
            raise Busy(said)
        if code in (408, 499) or code >= 500:
            raise Fault(said)
        if code == 404 and "does not exist" in answer.text:
            raise Fault(f"it serves other models than before, so it was started again: {said}")
        if code != 200:
            hint = f" (is the key in {KEY}?)" if code in (401, 403) else ""
            hint = " (was it started as docs/engines.md says?)" if code == 404 else hint
            raise EngineError(f"{self.url}{path} refuses: {said}{hint}")
        try:
            return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else None
        except ValueError as error:
            raise Fault(f"no JSON: {error}") from error

    async def call(self, method: str, **arguments: Any) -> list[Any]:
        answer = await self.ask("/collective_rpc", {"method": method, "kwargs": arguments})
        return list((answer or {}).get("results", []))

    async def greet(self) -> None:
        """Asks the server for its model, context and workers."""
        models = [model for model in (await self.ask("/v1/models"))["data"] if not model.get("parent")]
        self.model, self.context = models[0]["id"], models[0]["max_model_len"]
        weights = await self.call("cuda_agent_weights")
        self.workers, self.dtype, self.device = len(weights), weights[0]["dtype"], weights[0]["device"]

    async def complete(
        self, prompt: Sequence[int], params: SamplingParams, model: str, salt: str, **more: Any
    ) -> dict[str, Any]:
        """vLLM's choice, checked: ``token_ids``, their ``logprobs``, ``finish_reason``."""
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": params.max_tokens,
            "seed": params.seed % 2**63,
            "temperature": params.temperature,
            "stop_token_ids": list(params.stop_ids),
            "cache_salt": salt,
            "logprobs": 0,  # only of the sampled token
            "return_token_ids": True,
            "ignore_eos": True,  # stop tokens are given explicitly
            "skip_special_tokens": False,
            # parameters whose defaults differ between servers
            **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "n": 1, "min_tokens": 0},
            **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        }
        answer = await self.ask("/v1/completions", body | more)
        try:
            choice = answer["choices"][0]
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            finish, served = choice["finish_reason"], answer["model"]
            right = 0 < len(ids) == len(logprobs) <= params.max_tokens and all(x <= 1e-3 for x in logprobs)
            right = right and finish == ("stop" if ids[-1] in params.stop_ids else "length")
            right = right and (finish == "stop" or len(ids) == params.max_tokens) and served == model
        except (KeyError, IndexError, TypeError) as error:
            raise Fault(f"no completion in its answer: {type(error).__name__} {error}") from error
        if not right:
            raise Fault(f"{len(ids)} tokens of {params.max_tokens} by {served!r}, finished by {finish!r}")
        return dict(choice)
