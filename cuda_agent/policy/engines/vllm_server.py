"""Starts vLLM servers, sends HTTP requests to them or to external vLLM servers, and checks the answers.

A server started here listens on a Unix socket in a private folder, because vLLM's interface for replacing weights has
no password. vLLM requires its own PyTorch version. The variable ``CUDA_AGENT_VLLM_PYTHON`` may therefore name the
Python interpreter of vLLM's own environment. This package need not be installed there."""

import asyncio
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

import cuda_agent
from cuda_agent.config import SERVED_RANK, PolicyConfig
from cuda_agent.errors import PolicyError
from cuda_agent.policy.engines.engine import EngineError, EngineLost, SamplingParams
from cuda_agent.policy.engines.vllm_plugin import LEASE, WHOLE, on_processor, served

PYTHON = "CUDA_AGENT_VLLM_PYTHON"
NAME = "policy"  # name under which a server started here serves the weights
_STOP_SECONDS = 20.0
_ENTRY_POINT = "[vllm.general_plugins]\ncuda_agent = cuda_agent.policy.engines.vllm_plugin:register\n"


class VllmServer:
    """A vLLM server that this process starts. Create it in the main thread: Linux ends the server together with the
    thread that created it. ``device`` is the index of a GPU among those that this process may use, or None for the CPU.
    ``lease`` is the folder of the timing lease, a file lock that a process holds while it times a kernel. The server
    pauses during that time. If ``lease`` is None, it never pauses. Raises ``PolicyError`` if vLLM is missing."""

    def __init__(self, policy: Path, config: PolicyConfig, lease: Path | None, device: int | None) -> None:
        self.python = interpreter()
        self._folder = Path(tempfile.mkdtemp(prefix="vllm-"))  # 0700; a socket's path must be short
        self.socket = self._folder / "socket"
        self.log = self._folder / "log"
        command = [self.python, "-P", "-m", "cuda_agent.policy.engines.vllm_plugin", str(os.getpid())]
        command += ["--uds", str(self.socket)]
        lora, share = config.vllm.sync == "lora", config.vllm.gpu_memory if device is not None else None
        command += served(policy, NAME, config.context, config.engine_batch, share, SERVED_RANK if lora else None)
        environment = self._environment(config.threads, lora, lease, device)
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, env=environment, **streams)

    def _environment(self, threads: int, lora: bool, lease: Path | None, device: int | None) -> dict[str, str]:
        package = self._folder / "package"
        plugin = package / "cuda_agent_plugin-0.dist-info"
        plugin.mkdir(parents=True)
        (plugin / "METADATA").write_text("Name: cuda-agent-plugin\nVersion: 0\n")
        (plugin / "entry_points.txt").write_text(_ENTRY_POINT)
        (package / "cuda_agent").symlink_to(Path(cuda_agent.__file__).parent.resolve())
        environment = _clean_environment() | {"PYTHONPATH": str(package)}
        environment |= dict.fromkeys((WHOLE, "VLLM_SERVER_DEV_MODE", "VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE"), "1")
        if lora:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if lease is not None:
            environment[LEASE] = str(lease)
        if device is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # the GPUs that this process may use
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[device] if visible else str(device)
        else:
            environment = on_processor(environment, Path(self.python).parent.parent / "lib", threads)
        return environment

    def tail(self) -> str:
        """Returns the last 25 lines of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def interpreter() -> str:
    """Returns the path of a Python interpreter that can import vLLM. Raises ``PolicyError`` if there is none; the
    message says how to install vLLM."""
    python = os.environ.get(PYTHON, sys.executable)
    search = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
    try:
        found = not subprocess.run([python, "-c", search], env=_clean_environment(), capture_output=True).returncode
    except OSError as error:
        raise PolicyError(f"{PYTHON}={python} cannot be run: {error}") from error
    if not found:
        raise PolicyError(
            f"policy.engine=vllm, and {python} has no vLLM: install it (docs/engines.md), or name the interpreter of "
            f"an environment that has it in {PYTHON}, or running servers in policy.vllm.servers"
        )
    return python


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


KEY = "CUDA_AGENT_ENGINE_KEY"  # bearer token of external servers
REQUEST_SECONDS = 1800.0  # limit of one completion; then the server counts as dead
HEALTH_SECONDS = 10.0
START_SECONDS = 1800.0  # limit for loading the first policy
KEPT_SECONDS = 2.0  # longest idle time of a reused connection; vLLM closes it after 5


class Fault(Exception):
    """A request to one server failed; another server may answer it."""


class Busy(Fault):
    """A server answered that it is overloaded."""


class Replica:
    """One of the vLLM servers that an engine (``VllmEngine``) uses, and the HTTP connections to it. ``url`` has the
    form ``http://host:port``, or ``unix:/path`` for a Unix socket. ``server`` is None if this process did not start the
    server."""

    def __init__(self, url: str, server: VllmServer | None = None) -> None:
        self.url, self.server = url, server
        self.alive = True
        self.episodes = 0  # episodes assigned since the last change of weights
        self.model = ""  # name under which the server serves the policy
        self.context = 0
        self.workers = 0
        self.dtype, self.device = "", ""
        self.noise = math.inf  # difference from the trainer's log-probabilities in the last successful probe
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
        """Waits until the server answers. Raises EngineLost if the server ends or is silent for ``START_SECONDS``."""
        end, server = time.monotonic() + START_SECONDS, self.server
        while not await self.healthy():
            log = f":\n{server.tail()}" if server else ""
            if server and server.process.poll() is not None:
                raise EngineLost(f"vLLM ended with code {server.process.returncode} at its start{log}")
            if time.monotonic() > end:
                raise EngineLost(f"{self.url}: vLLM did not answer within {START_SECONDS:.0f} s{log}")
            await asyncio.sleep(0.25)

    async def ask(self, path: str, body: Any = None) -> Any:
        """Sends a request: POST with ``body``, or GET if ``body`` is None. Returns the answer's JSON, or None for other
        content. Raises EngineError if the server refuses the request, Busy if the server is overloaded, and Fault if
        the request fails otherwise."""
        method = "GET" if body is None else "POST"
        try:
            try:
                answer = await self._client.request(method, path, json=body)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                # The server closes idle connections. After a pause, even hundreds of kept connections may be closed.
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
        """Asks the server for the policy's name and context length, and for the number, element type and device of its
        workers. Stores the answers in the attributes ``model``, ``context``, ``workers``, ``dtype`` and ``device``."""
        models = [model for model in (await self.ask("/v1/models"))["data"] if not model.get("parent")]
        self.model, self.context = models[0]["id"], models[0]["max_model_len"]
        weights = await self.call("cuda_agent_weights")
        self.workers, self.dtype, self.device = len(weights), weights[0]["dtype"], weights[0]["device"]

    async def complete(
        self, prompt: Sequence[int], params: SamplingParams, model: str, salt: str, **more: Any
    ) -> dict[str, Any]:
        """Returns vLLM's completion of the token ids ``prompt``: a dict with the keys ``token_ids``, ``logprobs`` and
        ``finish_reason``, among others. ``model`` is the name under which the server serves the policy. Requests with
        different ``salt`` share no cached prefix. ``more`` holds further fields of the request. Raises the errors of
        ``ask``, and Fault if the completion contradicts ``params`` or ``model`` (for example, if it has too many
        tokens)."""
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": params.max_tokens,
            "seed": params.seed % 2**63,
            "temperature": params.temperature,
            "stop_token_ids": list(params.stop_ids),
            "cache_salt": salt,
            "logprobs": 0,  # log-probabilities of the sampled tokens only
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
