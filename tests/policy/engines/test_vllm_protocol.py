"""The vLLM engine against a scripted server: what it asks, and what it does when answers are late, wrong or missing."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from vllm_cases import CONTEXT, ScriptedServer, config_of, load_served, reference, write_policy

from cuda_agent.errors import PolicyError
from cuda_agent.policy.engines import vllm
from cuda_agent.policy.engines.engine import EngineError, EngineLost, SamplingParams
from cuda_agent.policy.engines.vllm import open_vllm
from cuda_agent.policy.engines.vllm_plugin import digest
from cuda_agent.policy.engines.vllm_server import PYTHON, interpreter
from cuda_agent.policy.lora import adapters, attach, save_adapter
from cuda_agent.policy.model import load_model

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def policies(tokenizer, tmp_path_factory):
    """(folder, model) of two policies of one shape."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    return [(folder, write_policy(folder, tokenizer, seed)) for seed, folder in enumerate(folders)]


@pytest.fixture
def servers(policies):
    """Starts scripted servers of the first policy."""
    started = []

    def start(count=1):
        started.extend(ScriptedServer(policies[0][0]) for _ in range(count))
        return started

    yield start
    for server in started:
        server.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(vllm, "PAUSE_SECONDS", 0.01)


@asynccontextmanager
async def engine_of(servers, policies, folder, **settings):
    urls = [server.url for server in servers]
    async with open_vllm(*policies[0], folder, config_of(urls, **settings)) as engine:
        for server in servers:
            server.asked.clear()
        yield engine


def test_what_is_asked_for_leaves_nothing_to_the_servers_defaults(servers, policies, tmp_path):
    (server,) = servers()

    async def script():
        async with engine_of([server], policies, tmp_path) as engine:
            params = SamplingParams(6, seed=2**63 - 1, temperature=0.7, stop_ids=(1, 2), key="episode")
            return await engine.generate(PROMPT, params)

    completion = asyncio.run(script())
    (asked,) = server.asked
    assert asked["prompt"] == PROMPT and asked["model"] == "served" and asked["seed"] == 2**63 - 1
    assert asked["stop_token_ids"] == [1, 2] and asked["ignore_eos"] and asked["return_token_ids"]
    assert (asked["top_p"], asked["top_k"], asked["min_p"], asked["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    np.testing.assert_allclose(completion.logprobs, reference(policies[0][1], PROMPT, completion.ids, 0.7), atol=1e-5)


@pytest.mark.parametrize(
    "faults",
    [[429] * 6, [500, 503], ["cut", "garbage"], [{"token_ids": [1, 2]}], [{"finish_reason": "abort"}]],
    ids=["busy", "broken", "cut", "short", "aborted"],
)
def test_what_fails_is_asked_again(servers, policies, tmp_path, faults):
    (server,) = servers()

    async def script():
        async with engine_of([server], policies, tmp_path) as engine:
            server.faults = list(faults)
            return await engine.generate(PROMPT, SamplingParams(4, seed=0))

    assert len(asyncio.run(script()).ids) == 4
    assert len(server.asked) == len(faults) + 1
    assert all(body == server.asked[0] for body in server.asked), "the same seed, so the same completion"


def test_connections_that_were_closed_meanwhile_are_no_fault_of_the_server(servers, policies, tmp_path):
    (server,) = servers()

    async def script():
        async with engine_of([server], policies, tmp_path) as engine:
            for server.keeps in (True, False):
                jobs = (engine.generate([9, i], SamplingParams(4, seed=i, key=f"episode {i}")) for i in range(32))
                completions = await asyncio.gather(*jobs)
            return completions

    assert [len(completion.ids) for completion in asyncio.run(script())] == [4] * 32


def test_a_refusal_is_told_and_not_repeated(servers, policies, tmp_path):
    (server,) = servers()

    async def script():
        async with engine_of([server], policies, tmp_path) as engine:
            server.faults = [400]
            with pytest.raises(EngineError, match="scripted"):
                await engine.generate(PROMPT, SamplingParams(4, seed=0))
            return await engine.generate(PROMPT, SamplingParams(4, seed=0))

    asyncio.run(script())
    assert len(server.asked) == 2


@pytest.mark.parametrize("how", ["hangs", "fails", "ends"])
def test_a_server_that_is_no_good_gives_its_requests_to_the_others(servers, policies, tmp_path, how):
    both = servers(2)

    async def script():
        async with engine_of(both, policies, tmp_path) as engine:
            if how == "ends":
                both[0].close()
            if how == "hangs":
                engine._replicas[0]._client.timeout = engine._replicas[0]._anew.timeout = httpx.Timeout(1.0)
            both[0].faults = ["hang" if how == "hangs" else 500] * 99
            jobs = (engine.generate([9, i], SamplingParams(4, seed=i, key=f"episode {i}")) for i in range(6))
            return await asyncio.gather(*jobs)

    completions = asyncio.run(script())
    assert [len(completion.ids) for completion in completions] == [4] * 6
    assert {body["prompt"][1] for body in both[1].asked} == set(range(6))


def test_when_none_is_left_the_engine_is_lost(servers, policies, tmp_path):
    both = servers(2)

    async def script():
        async with engine_of(both, policies, tmp_path) as engine:
            for server in both:
                server.faults = [500] * 99
            with pytest.raises(EngineLost, match=r"none of 2 vLLM servers is left.*HTTP 500"):
                await engine.generate(PROMPT, SamplingParams(4, seed=0))

    asyncio.run(script())


def test_an_address_where_nobody_answers_is_an_engine_lost(policies, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"

        async def script():
            async with open_vllm(*policies[0], tmp_path, config_of([address])):
                pass

        with pytest.raises(EngineLost, match="does not answer"):
            asyncio.run(script())


def test_an_episode_stays_with_its_server_and_episodes_are_shared_out_evenly(servers, policies, tmp_path):
    three = servers(3)

    async def script():
        async with engine_of(three, policies, tmp_path) as engine:
            for turn in range(3):
                jobs = (engine.generate([turn, i], SamplingParams(1, seed=0, key=f"e{i}")) for i in range(9))
                await asyncio.gather(*jobs)

    asyncio.run(script())
    seen = [sorted(tuple(body["prompt"]) for body in server.asked) for server in three]
    assert [len(prompts) for prompts in seen] == [9, 9, 9]
    for prompts in seen:
        episodes = {i for _, i in prompts}
        assert prompts == sorted((turn, i) for turn in range(3) for i in episodes) and len(episodes) == 3


def test_a_cancelled_request_is_given_up_at_the_server_too(servers, policies, tmp_path):
    (server,) = servers()

    async def script():
        async with engine_of([server], policies, tmp_path) as engine:
            server.faults = ["hang"]
            job = asyncio.ensure_future(engine.generate(PROMPT, SamplingParams(4, seed=0)))
            while not server.asked:
                await asyncio.sleep(0.01)
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job
            await asyncio.to_thread(server.left.wait, 20)

    asyncio.run(script())
    assert server.left.is_set()


def test_requests_under_way_finish_on_the_old_weights(servers, policies, tmp_path):
    (server,) = servers()
    (_, first), (_, second) = policies

    async def script():
        async with engine_of([server], policies, tmp_path) as engine:
            server.delay = 0.3
            params = SamplingParams(5, seed=0)
            before = [asyncio.ensure_future(engine.generate(PROMPT, params)) for _ in range(3)]
            while len(server.asked) < 3:
                await asyncio.sleep(0.01)
            updating = asyncio.ensure_future(engine.update_from(second, 7))
            await asyncio.sleep(0)  # begun: from now on requests wait
            after = await engine.generate(PROMPT, params)
            await updating
            return await asyncio.gather(*before), after

    before, after = asyncio.run(script())
    assert [completion.version for completion in before] == [0, 0, 0] and after.version == 7
    np.testing.assert_allclose(before[0].logprobs, reference(first, PROMPT, before[0].ids), atol=1e-5)
    np.testing.assert_allclose(after.logprobs, reference(second, PROMPT, after.ids), atol=1e-5)
    assert not server.paused
    salts = [body["cache_salt"] for body in server.asked if body["max_tokens"] == 5]
    assert salts[0] == salts[1] == salts[2] != salts[3]


@pytest.mark.parametrize("how", ["does nothing", "misses what is computed with"])
@pytest.mark.parametrize("change", [1.0, 1e-5], ids=["large", "small"])
def test_stale_weights_fail_loudly_and_for_good(servers, policies, tmp_path, how, change):
    """Small: below what the absolute tolerance of the probe can see."""
    good, bad = servers(2)
    model = load_model(policies[0][0])

    async def script():
        async with engine_of([good, bad], policies, tmp_path) as engine:
            bad.loads, bad.reaches = how != "does nothing", how != "misses what is computed with"
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(change * 0.1 * torch.randn(parameter.shape))
            with pytest.raises(EngineError, match=f"{bad.url} (does not|still|has not) .*weights"):
                await engine.update_from(model, 1)
            with pytest.raises(EngineError, match="has failed"):
                await engine.generate(PROMPT, SamplingParams(1, seed=0))

    asyncio.run(script())


def test_the_same_weights_again_are_no_stale_ones(servers, policies, tmp_path):
    (server,) = servers()

    async def script():
        async with engine_of([server], policies, tmp_path) as engine:
            await engine.update_from(policies[0][1], 1)
            return (await engine.generate(PROMPT, SamplingParams(1, seed=0))).version

    assert asyncio.run(script()) == 1


def test_a_server_that_died_takes_part_again_after_the_next_change_of_weights(servers, policies, tmp_path):
    both = servers(2)

    async def script():
        async with engine_of(both, policies, tmp_path) as engine:
            both[0].faults = [500] * 3
            await engine.generate(PROMPT, SamplingParams(1, seed=0))
            both[0].asked.clear()
            await engine.generate(PROMPT, SamplingParams(1, seed=0))
            assert not both[0].asked
            await engine.update_from(policies[1][1], 1)
            await asyncio.gather(*(engine.generate(PROMPT, SamplingParams(2, seed=i)) for i in range(2)))

    asyncio.run(script())
    assert [sum(body["max_tokens"] == 2 for body in server.asked) for server in both] == [1, 1]


def test_a_server_that_was_started_again_serves_nothing_until_it_has_new_weights(servers, policies, tmp_path):
    """It comes back with the weights of its start, under another name."""
    both = servers(2)

    async def script():
        async with engine_of(both, policies, tmp_path) as engine:
            both[0].name = "served-again"
            both[0].asked.clear()
            for seed in range(4):
                await engine.generate(PROMPT, SamplingParams(1, seed=seed))
            assert {body["model"] for body in both[0].asked} == {"served"}, "what it serves now was asked for by nobody"
            await engine.update_from(policies[1][1], 1)
            await asyncio.gather(*(engine.generate(PROMPT, SamplingParams(2, seed=i)) for i in range(2)))

    asyncio.run(script())
    assert [sum(body["max_tokens"] == 2 for body in server.asked) for server in both] == [1, 1]


def test_a_pools_servers_are_given_the_first_policy_and_waited_for(servers, policies, tmp_path, monkeypatch):
    (server,) = servers()
    shared = tmp_path / "shared"
    monkeypatch.setenv(vllm.SHARED, str(shared))
    server.ready = lambda: (shared / "policy" / "config.json").exists()
    calls = []

    async def script():
        async with engine_of([server], policies, tmp_path) as engine:
            calls.append(await engine.generate(PROMPT, SamplingParams(1, seed=0)))
        first = (shared / "policy" / "model.safetensors").read_bytes()
        later = open_vllm(*policies[1], tmp_path, config_of([server.url]))
        async with later as engine:
            calls.append(await engine.generate(PROMPT, SamplingParams(1, seed=0)))
        assert (shared / "policy" / "model.safetensors").read_bytes() == first, "a later stage's policy is an update"

    asyncio.run(script())
    assert len(calls) == 2 and not [item for item in shared.iterdir() if item.name.startswith("policy-")]


def test_weights_written_for_servers_do_not_pile_up(servers, policies, tmp_path):
    (server,) = servers()

    async def script():
        async with engine_of([server], policies, tmp_path) as engine:
            for version in range(1, 4):
                await engine.update_from(policies[version % 2][1], version)

    asyncio.run(script())
    assert len(list((tmp_path / "weights").iterdir())) == 1


def test_a_prompt_without_room_is_refused(servers, policies, tmp_path):
    (server,) = servers()

    async def script():
        async with engine_of([server], policies, tmp_path) as engine:
            with pytest.raises(ValueError, match="no room"):
                await engine.generate([1] * CONTEXT, SamplingParams(1, seed=0))

    asyncio.run(script())


def trained_adapters(folder, change: float):
    """A model of ``folder`` whose adapters were trained by a step of size ``change``."""
    model = load_model(folder)
    attach(model, 4, 8.0, ["q_proj", "down_proj"])
    push(model, change)
    return model


def push(model, change: float) -> None:
    with torch.no_grad():
        for layer in adapters(model).values():
            layer.up.add_(change * torch.randn(layer.up.shape))


def test_adapters_are_served_by_version_and_the_old_ones_unloaded(servers, policies, tmp_path):
    both = servers(2)

    async def script():
        async with engine_of(both, policies, tmp_path, sync="lora") as engine:
            model = trained_adapters(policies[0][0], 0.0)
            completions = []
            for version in range(1, 4):
                await engine.update_from(model, version)
                completions.append(await engine.generate(PROMPT, SamplingParams(5, seed=0)))
                np.testing.assert_allclose(
                    completions[-1].logprobs, reference(model, PROMPT, completions[-1].ids), atol=1e-5
                )
                assert [len(server.adapters) for server in both] == [1, 1]
                push(model, 0.3)
            return completions, [next(iter(server.adapters)) for server in both]

    completions, names = asyncio.run(script())
    assert [completion.version for completion in completions] == [1, 2, 3]
    assert len({tuple(completion.logprobs) for completion in completions}) == 3
    assert names[0] == names[1] and "-3-" in names[0]
    assert [len(server.adapters) for server in both] == [0, 0], "nothing of ours stays with servers of others"
    assert len(list((tmp_path / "weights").iterdir())) == 1


@pytest.mark.parametrize("change", [0.3, 1e-5], ids=["large", "small"])
def test_a_stale_adapter_fails_loudly(servers, policies, tmp_path, change):
    """Small: below what the absolute tolerance of the probe can see."""
    good, bad = servers(2)

    async def script():
        async with engine_of([good, bad], policies, tmp_path, sync="lora") as engine:
            model = trained_adapters(policies[0][0], 0.3)
            await engine.update_from(model, 1)
            push(model, change)
            bad.forgets = True
            with pytest.raises(EngineError, match=f"{bad.url} (does not serve|still serves) the weights"):
                await engine.update_from(model, 2)
            with pytest.raises(EngineError, match="has failed"):
                await engine.generate(PROMPT, SamplingParams(1, seed=0))

    asyncio.run(script())


def test_an_adapter_is_merged_as_its_format_says(policies, tmp_path):
    folder, model = policies[0]
    generator = torch.Generator().manual_seed(0)
    down, up = (torch.randn(shape, generator=generator) for shape in [(4, 64), (64, 4)])
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "bias": "none"}))
    served = load_served(tmp_path, folder)
    for (key, old), new in zip(model.named_parameters(), served.parameters(), strict=True):
        change = 2.0 * up @ down if key.endswith("layers.1.self_attn.q_proj.weight") else 0.0
        torch.testing.assert_close(new, old + change)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "use_dora": True}))
    with pytest.raises(PolicyError, match="use_dora"):
        load_served(tmp_path, folder)


def test_a_model_without_adapter_cannot_be_served_as_one(policies, tmp_path):
    with pytest.raises(PolicyError, match=r"set lora\.rank"):
        save_adapter(policies[0][1], tmp_path)


@pytest.mark.parametrize("python", ["/usr/bin/python3", "/nowhere/python"])
def test_without_vllm_a_person_is_told_what_to_do(monkeypatch, python):
    monkeypatch.setenv(PYTHON, python)
    with pytest.raises(PolicyError, match=PYTHON):
        interpreter()


def test_a_digest_tells_weights_apart_that_sum_up_to_the_same():
    one = torch.tensor([1.0, 2.0])
    assert digest([("w", one)]) != digest([("w", torch.tensor([1.5, 1.5]))])
    assert digest([("w", one)]) == digest([("w", one.clone())]) != digest([("v", one)])
    many = torch.arange(64.0)
    assert digest([("w", many)]) != digest(
        [("w", many[torch.randperm(64, generator=torch.Generator().manual_seed(0))])]
    )
    assert digest([("w", many.to(torch.bfloat16))]) != digest([("w", many.to(torch.bfloat16) + 1)])
