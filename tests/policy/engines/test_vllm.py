"""The vLLM engine against real vLLM servers on the CPU.

Needs an environment with vLLM: this one, or that of the interpreter which CUDA_AGENT_VLLM_PYTHON names.  The servers
start once a session; the tests share one and give it weights of their own.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from vllm_cases import CONTEXT, config_of, reference, write_policy

import cuda_agent
from cuda_agent.errors import PolicyError
from cuda_agent.lease import Lease
from cuda_agent.policy.engines.engine import EngineError, EngineLost, SamplingParams
from cuda_agent.policy.engines.local import LocalEngine
from cuda_agent.policy.engines.vllm import SHARED, open_vllm
from cuda_agent.policy.engines.vllm_plugin import STEP_TOKENS, WHOLE
from cuda_agent.policy.engines.vllm_server import _ENTRY_POINT, Replica, VllmServer, interpreter
from cuda_agent.policy.lora import adapters, attach
from cuda_agent.policy.model import load_model
from tests.ports import free_port

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="session")
def policies(tokenizer, tmp_path_factory):
    """(folder, model) of two policies of one shape."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    return [(folder, write_policy(folder, tokenizer, seed)) for seed, folder in enumerate(folders)]


@pytest.fixture(scope="session")
def start(policies):
    """Starts a server of the first policy."""
    try:
        interpreter()
    except PolicyError as error:
        pytest.skip(str(error))
    servers: list[VllmServer] = []

    def start(sync="disk", lease=None):
        server = VllmServer(policies[0][0], config_of(batch=16, threads=1, sync=sync), lease, None)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()  # again does nothing


async def ready(server: VllmServer) -> None:
    replica = Replica(f"unix:{server.socket}", server)
    await replica.ready()
    await replica.close()


@pytest.fixture(scope="session")
def lease(tmp_path_factory):
    return tmp_path_factory.mktemp("lease")


@pytest.fixture(scope="session")
def server(start, lease):
    """One that the tests share; it takes adapters, and pauses under the lease."""
    server = start("lora", lease)
    asyncio.run(ready(server))
    return server


@pytest.fixture
def open_engine(server, policies, tmp_path):
    """An engine on the shared server, which serves the first policy."""

    @asynccontextmanager
    async def opened(sync="disk", servers=(server,)):
        urls = [f"unix:{one.socket}" for one in servers]
        async with open_vllm(*policies[0], tmp_path, config_of(urls, sync=sync)) as engine:
            yield engine

    return opened


def gauge(server, name):
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(server.socket)), base_url="http://vllm") as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def descendants(pid):
    children = [
        int(child) for part in Path(f"/proc/{pid}/task").glob("*/children") for child in part.read_text().split()
    ]
    return children + [pid for child in children for pid in descendants(child)]


def prompts(count, length=12):
    return [[(31 * i + 7 * j) % 256 for j in range(length)] for i in range(count)]


def check(completion, model, prompt, temperature=1.0):
    wanted = reference(model, prompt, completion.ids, temperature)
    np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-4)


def test_logprobs_are_those_of_the_model_at_the_temperature(open_engine, policies):
    temperatures = [1.0, 0.7, 1.5]

    async def script():
        async with open_engine() as engine:
            jobs = [
                engine.generate(prompt, SamplingParams(10 + i, seed=2**62 + i, temperature=temperatures[i % 3]))
                for i, prompt in enumerate(prompts(9))
            ]
            return await asyncio.gather(*jobs)

    for i, (prompt, completion) in enumerate(zip(prompts(9), asyncio.run(script()), strict=True)):
        assert len(completion.ids) == 10 + i and completion.finish == "length"
        check(completion, policies[0][1], prompt, temperatures[i % 3])


def test_greedy_is_the_in_process_engines_greedy(open_engine, policies):
    jobs = [(prompt, SamplingParams(24, seed=0, temperature=0.0)) for prompt in prompts(4)]

    async def script(engine):
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt, params in jobs))

    async def both():
        local = LocalEngine(policies[0][1], threads=1)
        async with open_engine() as engine:
            try:
                return await script(engine), await script(local)
            finally:
                await local.close()

    served, local = asyncio.run(both())
    assert [completion.ids for completion in served] == [completion.ids for completion in local]
    for one, other in zip(served, local, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_a_completion_is_a_function_of_prompt_and_seed(open_engine):
    prompt = prompts(1)[0]

    async def script():
        async with open_engine() as engine:
            alone = await engine.generate(prompt, SamplingParams(20, seed=11))
            jobs = [engine.generate(prompt, SamplingParams(20, seed=seed)) for seed in range(8, 16)]
            return alone, await asyncio.gather(*jobs)

    alone, company = asyncio.run(script())
    assert company[3].ids == alone.ids
    assert len({tuple(completion.ids) for completion in company}) == 8


def test_a_stop_token_ends_the_completion_and_is_part_of_it(open_engine, policies, tokenizer):
    prompt = prompts(1)[0]

    async def script():
        async with open_engine() as engine:
            free = await engine.generate(prompt, SamplingParams(40, seed=3))
            stop = free.ids[9]
            stopped = await engine.generate(prompt, SamplingParams(40, seed=3, stop_ids=(stop,)))
            return free, stop, stopped

    free, stop, stopped = asyncio.run(script())
    assert stopped.finish == "stop" and stopped.ids == free.ids[: free.ids.index(stop) + 1]
    check(stopped, policies[0][1], prompt)


def test_later_turns_start_behind_what_was_computed(open_engine, server, policies):
    long = prompts(1, length=200)[0]

    async def script():
        async with open_engine() as engine:
            first = await engine.generate(long, SamplingParams(20, seed=1, key="episode"))
            before = gauge(server, "prefix_cache_hits_total")
            turn = [*long, *first.ids, 5, 6, 7]
            second = await engine.generate(turn, SamplingParams(20, seed=2, key="episode"))
            return turn, second, gauge(server, "prefix_cache_hits_total") - before

    turn, second, hits = asyncio.run(script())
    assert hits >= 128
    check(second, policies[0][1], turn)


def test_prompts_that_do_not_fit_into_one_step_are_served(open_engine, policies):
    jobs = prompts(16, length=400)
    assert len(jobs) * 400 > STEP_TOKENS

    async def script():
        async with open_engine() as engine:
            return await asyncio.gather(*(engine.generate(p, SamplingParams(4, seed=i)) for i, p in enumerate(jobs)))

    for prompt, completion in zip(jobs, asyncio.run(script()), strict=True):
        check(completion, policies[0][1], prompt)


def test_a_cancelled_request_frees_the_server(open_engine, server):
    async def script():
        async with open_engine() as engine:
            jobs = [asyncio.ensure_future(engine.generate([1, i], SamplingParams(500, seed=i))) for i in range(4)]
            while gauge(server, "num_requests_running") < 4:
                await asyncio.sleep(0.05)
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            for _ in range(400):
                if not gauge(server, "num_requests_running"):
                    return [job.cancelled() for job in jobs]
                await asyncio.sleep(0.05)

    assert asyncio.run(script()) == [True] * 4


@pytest.mark.parametrize("sync", ["disk", "nccl"])
def test_new_weights_are_served_from_the_next_call_on(open_engine, policies, sync):
    """On a CPU the broadcast goes by Gloo, through the same code."""
    (_, first), (_, second) = policies
    prompt = prompts(1)[0]

    async def script():
        async with open_engine(sync) as engine:
            under_way = [asyncio.ensure_future(engine.generate(prompt, SamplingParams(60, seed=i))) for i in range(2)]
            await asyncio.sleep(0.1)
            await engine.update_from(second, 1)
            after = await engine.generate(prompt, SamplingParams(20, seed=0))
            await engine.update_from(first, 2)
            return await asyncio.gather(*under_way), after, await engine.generate(prompt, SamplingParams(20, seed=0))

    before, after, back = asyncio.run(script())
    for completion, model, version in [(before[0], first, 0), (before[1], first, 0), (after, second, 1)]:
        assert completion.version == version
        check(completion, model, prompt)
    assert back.version == 2 and back.ids == before[0].ids[:20]
    check(back, first, prompt)


def test_what_training_changes_in_adapters_is_served_and_a_stale_one_fails_loudly(
    open_engine, server, policies, tmp_path, monkeypatch
):
    model = load_model(policies[0][0])
    attach(model, 8, 16.0, ["q_proj", "v_proj", "gate_proj", "down_proj"])
    prompt, ask = prompts(1)[0], Replica.ask

    def learn():
        with torch.no_grad():
            for layer in adapters(model).values():
                layer.up.add_(0.2 * torch.randn(layer.up.shape))

    def served_names():
        transport = httpx.HTTPTransport(uds=str(server.socket))
        with httpx.Client(transport=transport, base_url="http://vllm") as client:
            return [entry["id"] for entry in client.get("/v1/models").json()["data"] if entry["parent"]]

    async def script():
        async with open_engine():
            pass  # whoever came before left other weights
        async with open_engine("lora") as engine:
            paths = []

            async def noting(self, path, body=None):
                if path == "/v1/load_lora_adapter":
                    paths.append(body["lora_path"])
                return await ask(self, path, body)

            monkeypatch.setattr(Replica, "ask", noting)
            for version in range(1, 4):
                await engine.update_from(model, version)
                completion = await engine.generate(prompt, SamplingParams(20, seed=0))
                assert completion.version == version
                check(completion, model, prompt)
                assert len(served_names()) == 1
                learn()
            shutil.copytree(paths[-1], tmp_path / "stale")

            async def stale(self, path, body=None):
                if path == "/v1/load_lora_adapter":
                    body = body | {"lora_path": str(tmp_path / "stale")}
                return await ask(self, path, body)

            monkeypatch.setattr(Replica, "ask", stale)
            with pytest.raises(EngineError, match="the weights"):
                await engine.update_from(model, 4)
            with pytest.raises(EngineError, match="has failed"):
                await engine.generate(prompt, SamplingParams(1, seed=0))

    asyncio.run(script())
    assert served_names() == []


def test_an_update_that_does_nothing_fails_loudly(open_engine, policies, monkeypatch):
    call = Replica.call

    async def lazy(self, method, **arguments):
        if method == "cuda_agent_load":
            return await call(self, "cuda_agent_weights")
        return await call(self, method, **arguments)

    async def script():
        async with open_engine() as engine:
            monkeypatch.setattr(Replica, "call", lazy)
            with pytest.raises(EngineError, match="does not serve the weights"):
                await engine.update_from(policies[1][1], 1)
            with pytest.raises(EngineError, match="has failed"):
                await engine.generate([1, 2], SamplingParams(1, seed=0))

    asyncio.run(script())


def test_decoding_waits_while_a_time_is_taken(open_engine, lease):
    async def script():
        async with open_engine() as engine:
            started = time.monotonic()
            await engine.generate([1, 2], SamplingParams(2, seed=0))
            usual = time.monotonic() - started
            with Lease(lease).timing():
                job = asyncio.ensure_future(engine.generate([1, 2], SamplingParams(2, seed=0)))
                done, _ = await asyncio.wait([job], timeout=1.0 + 5 * usual)
            assert not done
            await job

    asyncio.run(script())


def test_a_reload_that_misses_what_is_computed_with_fails_loudly(start, open_engine, policies, monkeypatch):
    """vLLM on a CPU as it comes, without our plugin: it multiplies with packed copies of the weights."""
    monkeypatch.setenv("VLLM_PLUGINS", "none-of-them")
    plain = start()

    async def script():
        await ready(plain)
        with pytest.raises(EngineError, match="does not serve the weights"):
            async with open_engine(servers=[plain]) as engine:
                await engine.update_from(policies[1][1], 1)

    try:
        asyncio.run(script())
    finally:
        plain.close()


def test_two_servers_share_episodes_and_one_that_is_killed_loses_nothing(start, policies, tmp_path):
    folder, model = policies[0]
    episodes = prompts(6)

    async def play(engine, index, tokens):
        ids = list(episodes[index])
        for turn in range(3):
            params = SamplingParams(tokens, seed=10 * index + turn, key=f"episode {index}")
            completion = await engine.generate(ids, params)
            check(completion, model, ids)
            ids += [*completion.ids, 7, index]
        return ids

    async def script():
        async with open_vllm(folder, model, tmp_path, config_of(replicas=2, batch=16, threads=1)) as engine:
            first, second = (replica.server for replica in engine._replicas)
            calm = await asyncio.gather(*(play(engine, i, 100) for i in range(6)))
            assert [gauge(one, "request_success_total") for one in (first, second)] == [10, 10], "9 turns and a probe"
            jobs = [asyncio.ensure_future(play(engine, i, 100)) for i in range(6)]
            while gauge(first, "num_requests_running") < 3:
                await asyncio.sleep(0.01)
            parts = descendants(first.process.pid)
            assert len(parts) >= 2, "its engine and its worker"
            first.process.send_signal(signal.SIGKILL)
            assert await asyncio.gather(*jobs) == calm
            while any(Path(f"/proc/{pid}").exists() for pid in parts):
                await asyncio.sleep(0.05)
            await engine.update_from(policies[1][1], 1)
            assert (await engine.generate(episodes[0], SamplingParams(4, seed=0))).version == 1
            second.process.send_signal(signal.SIGKILL)
            with pytest.raises(EngineLost, match="none of 2"):
                await engine.generate(episodes[0], SamplingParams(4, seed=0))

    asyncio.run(script())


def test_a_server_of_a_pool_waits_for_the_first_policy_and_answers_nobody_by_an_older_name(
    policies, tmp_path, monkeypatch
):
    """As in a pod: a program of its own behind a port, which finds the package beside vLLM."""
    try:
        python = interpreter()
    except PolicyError as error:
        pytest.skip(str(error))
    package, shared = tmp_path / "package", tmp_path / "shared"
    (package / "cuda_agent-0.dist-info").mkdir(parents=True)
    (package / "cuda_agent-0.dist-info" / "METADATA").write_text("Name: cuda-agent\nVersion: 0\n")
    (package / "cuda_agent-0.dist-info" / "entry_points.txt").write_text(_ENTRY_POINT)
    (package / "cuda_agent").symlink_to(Path(cuda_agent.__file__).parent)
    port = free_port()
    monkeypatch.setenv(SHARED, str(shared))
    settings = {"context": CONTEXT, "batch": 4, "memory": 0.5, "threads": 1, "port": port}
    line = [python, "-P", "-m", "cuda_agent.policy.engines.vllm_pool", str(shared)]
    line += [f"--{name}={value}" for name, value in settings.items()]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONPATH": str(package), "VLLM_SERVER_DEV_MODE": "1", WHOLE: "1", "HF_HUB_OFFLINE": "1"}

    def begin():
        with open(tmp_path / "log", "ab") as log:
            return subprocess.Popen(line, env=environment, stdout=log, stderr=log)

    processes = [begin()]

    async def script():
        urls = [f"http://127.0.0.1:{port}"]
        async with open_vllm(*policies[0], tmp_path, config_of(urls)) as engine:
            for version in range(2):
                prompt = prompts(1)[0]
                completion = await engine.generate(prompt, SamplingParams(4, seed=version))
                assert completion.version == version
                check(completion, policies[version][1], prompt)
                if not version:
                    await engine.update_from(policies[1][1], 1)
            processes[0].kill()
            processes[0].wait()
            processes.append(begin())
            while not await engine._replicas[0].healthy():
                await asyncio.sleep(0.5)
            with pytest.raises(EngineLost, match="started again"):
                await engine.generate(prompt, SamplingParams(4, seed=2))

    try:
        asyncio.run(asyncio.wait_for(script(), 300))
    except BaseException:
        print((tmp_path / "log").read_text()[-6000:])
        raise
    finally:
        for process in processes:
            process.kill()
            process.wait()
