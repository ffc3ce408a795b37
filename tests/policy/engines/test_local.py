import asyncio
import copy
import fcntl
import os
import random

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from cuda_agent.lease import Lease
from cuda_agent.policy.engines import local, native
from cuda_agent.policy.engines.decoder import DenseDecoder, GenericDecoder, make_decoder, verify
from cuda_agent.policy.engines.engine import SamplingParams
from cuda_agent.policy.engines.local import EngineError, LocalEngine, copied
from cuda_agent.policy.engines.sampling import draw, uniforms
from tests.waiting import AskedLease

SMALL = {"vocab_size": 90, "max_position_embeddings": 128}
DENSE = SMALL | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}


def prompts(count, seed=0, shortest=5, longest=40):
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def serve(engine, jobs):
    """Completions of (prompt, params), all submitted at once."""

    async def all_of_them():
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt, params in jobs))

    return asyncio.run(all_of_them())


def reference(model, prompt, ids, temperature=1.0):
    """Log-probabilities of ``ids`` behind ``prompt`` by the model's own forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0].numpy()


@pytest.fixture
def engine(policy):
    engine = LocalEngine(policy, threads=1, batch=4)
    yield engine
    asyncio.run(engine.close())


@pytest.mark.parametrize(
    "model",
    [
        lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DENSE, num_key_value_heads=2)),
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DENSE, num_key_value_heads=4)),
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**DENSE, num_key_value_heads=1, rope_parameters=LLAMA3)
        ),
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=90, n_positions=128, n_embd=32, n_layer=2, n_head=4)
        ),
    ],
    ids=["qwen2", "llama", "llama3-rope", "gpt2"],
)
def test_every_decoder_agrees_with_its_model(model):
    model = model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    decoder = make_decoder(model, 2)
    assert isinstance(decoder, GenericDecoder if model.config.model_type == "gpt2" else DenseDecoder)
    assert verify(decoder, model) < 1e-5


def test_a_decoder_of_any_model_takes_a_model_that_got_adapters():
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=90, n_positions=128, n_embd=32, n_layer=2, n_head=4)
    ).eval()

    async def script():
        engine = LocalEngine(model, threads=1, batch=2)
        learner = copy.deepcopy(model)
        learner.transformer.h[0].mlp.add_module("down", torch.nn.Linear(2, 2))  # other keys, as ``attach`` makes
        for version in (1, 2):
            await engine.update_from(learner, version)
        await engine.close()
        return engine.version

    assert asyncio.run(script()) == 2


def test_a_small_model_is_decoded_by_one_thread_and_trained_by_all(policy, monkeypatch):
    seen = []
    advance = LocalEngine._advance
    monkeypatch.setattr(LocalEngine, "_advance", lambda self: seen.append(torch.get_num_threads()) or advance(self))

    async def script(small):
        monkeypatch.setattr(local, "SMALL", small)
        engine = LocalEngine(policy, threads=2, batch=2)
        for _ in range(2):
            await engine.generate([5, 6, 7], SamplingParams(3, seed=0))
            seen.append(await engine.compute(torch.get_num_threads))
        await engine.close()

    asyncio.run(script(1 << 24))
    assert seen == [1, 1, 2] * 2
    seen.clear()
    asyncio.run(script(10))
    assert set(seen) == {2}


def peaked(seed=0):
    """A bfloat16 model that is nearly sure of each next token, so that rounding moves its log-probabilities a lot."""
    torch.manual_seed(seed)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DENSE, num_key_value_heads=2)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(120)
    return model.to(torch.bfloat16)


def test_a_peaked_policy_in_half_precision_is_served():
    model = peaked()
    assert verify(make_decoder(model, 2), model) > local.LOW_TOLERANCE, "else the test shows nothing"
    asyncio.run(LocalEngine(model, threads=1, batch=2, dtype="bfloat16").close())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_that_computes_another_function_is_refused(dtype, monkeypatch):
    model, other = peaked().to(dtype), peaked(seed=1).to(dtype)
    other.lm_head, other.model.embed_tokens = model.lm_head, model.model.embed_tokens
    monkeypatch.setattr(local, "make_decoder", lambda _, rows: make_decoder(other, rows))
    with pytest.raises(EngineError, match="differ from the model's"):
        LocalEngine(model, threads=1, batch=2)


@pytest.mark.parametrize("compiled", [True, False])
def test_steps_agree_with_the_model_with_and_without_a_compiler(policy, monkeypatch, compiled):
    if not compiled:
        monkeypatch.setattr(native.shutil, "which", lambda name: None)
        monkeypatch.setattr(native, "library", native.library.__wrapped__)
    decoder = DenseDecoder(policy, 2)
    assert (decoder.native is not None) == compiled
    assert verify(decoder, policy) < 1e-5


def test_a_prompt_longer_than_the_cache_so_far_makes_it_grow(policy):
    decoder = DenseDecoder(policy, 2)
    decoder.cache = decoder.cache[:, :, :, :8].clone()
    assert verify(decoder, policy) < 1e-5


def test_logprobs_are_those_of_the_model(engine, policy):
    jobs = [
        (prompt, SamplingParams(max_tokens=20 + i, seed=i, temperature=temperature))
        for i, (prompt, temperature) in enumerate(zip(prompts(10), [1.0, 0.7, 1.5] * 4, strict=False))
    ]
    for (prompt, params), completion in zip(jobs, serve(engine, jobs), strict=True):
        assert len(completion.ids) == params.max_tokens and completion.finish == "length"
        wanted = reference(policy, prompt, completion.ids, params.temperature)
        np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-4)


def test_greedy_takes_the_likeliest_token(engine, policy):
    prompt = prompts(1)[0]
    (completion,) = serve(engine, [(prompt, SamplingParams(max_tokens=12, seed=0, temperature=0.0))])
    with torch.no_grad():
        logits = policy(input_ids=torch.tensor([prompt + completion.ids])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == completion.ids
    np.testing.assert_allclose(completion.logprobs, reference(policy, prompt, completion.ids), atol=1e-4)


def test_a_stop_token_ends_the_completion_and_is_part_of_it(engine):
    prompt = prompts(1)[0]
    (free,) = serve(engine, [(prompt, SamplingParams(max_tokens=30, seed=3))])
    stop = free.ids[7]
    (stopped,) = serve(engine, [(prompt, SamplingParams(max_tokens=30, seed=3, stop_ids=(stop,)))])
    assert stopped.finish == "stop"
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]


def test_a_completion_does_not_depend_on_its_company(policy):
    jobs = [(p, SamplingParams(max_tokens=10 + 5 * (i % 4), seed=i % 3)) for i, p in enumerate(prompts(12))]

    def ids(batch, jobs):
        engine = LocalEngine(policy, threads=1, batch=batch)
        completions = serve(engine, jobs)
        asyncio.run(engine.close())
        return [completion.ids for completion in completions]

    together = ids(6, jobs)
    assert ids(1, jobs) == together
    assert ids(3, jobs[::-1])[::-1] == together


async def lockstep(engine, episodes):
    """Episodes of several turns that wait for nothing but the engine; all ids and log-probabilities."""

    async def episode(index, prompt):
        ids, seen = list(prompt), []
        for turn in range(3):
            completion = await engine.generate(ids, SamplingParams(4 + (index + turn) % 7, seed=10 * index + turn))
            ids += [*completion.ids, 7, index]
            seen.append((completion.ids, completion.logprobs))
        return seen

    return await asyncio.gather(*(episode(i, p) for i, p in enumerate(episodes)))


def test_two_runs_in_lockstep_are_bit_identical(policy):
    def run():
        engine = LocalEngine(policy, threads=1, batch=4)
        try:
            return asyncio.run(lockstep(engine, prompts(9))), engine.counts.steps
        finally:
            asyncio.run(engine.close())

    assert run() == run()


def test_later_turns_start_behind_what_was_computed(engine, policy):
    episodes = prompts(4, shortest=20)
    turns = asyncio.run(lockstep(engine, episodes))
    prompt_tokens = sum(map(len, episodes))
    later = 4 * 2 * 3  # of each later turn: the last sampled token and the two that follow it
    assert engine.counts.prefilled == prompt_tokens + later
    for prompt, seen in zip(episodes, turns, strict=True):
        ids = list(prompt)
        for sampled, logprobs in seen:
            np.testing.assert_allclose(logprobs, reference(policy, ids, sampled), atol=1e-4)
            ids += [*sampled, 7, episodes.index(prompt)]


def test_samples_of_one_prompt_compute_it_once(engine, policy):
    prompt = prompts(1, shortest=30)[0]
    jobs = [(prompt, SamplingParams(max_tokens=8, seed=seed)) for seed in range(7)]  # more than a batch
    completions = serve(engine, jobs)
    assert engine.counts.prefilled <= len(prompt) + 3
    assert len({tuple(c.ids) for c in completions}) > 1
    for completion in completions:
        np.testing.assert_allclose(completion.logprobs, reference(policy, prompt, completion.ids), atol=1e-4)


def test_an_architecture_it_does_not_know_is_served_too():
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=256, n_positions=128, n_embd=32, n_layer=2, n_head=4)
    ).eval()
    engine = LocalEngine(model, threads=1, batch=3)
    turns = asyncio.run(lockstep(engine, prompts(5, shortest=10)))
    for index, (prompt, seen) in enumerate(zip(prompts(5, shortest=10), turns, strict=True)):
        ids = list(prompt)
        for sampled, logprobs in seen:
            np.testing.assert_allclose(logprobs, reference(model, ids, sampled), atol=1e-4)
            ids += [*sampled, 7, index]
    assert engine.counts.reused > 0
    asyncio.run(engine.close())


def test_noise_depends_on_seed_and_position_alone():
    whole = uniforms(5, 0, 40)
    for start in range(1, 9):
        np.testing.assert_array_equal(uniforms(5, start, 20), whole[start : start + 20])
    assert not np.array_equal(uniforms(6, 0, 40), whole)
    assert uniforms(-1, 0, 3).shape == (3,)


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.5, -torch.inf, 2.0, 0.0, -1.0])
    noise = torch.from_numpy(uniforms(1, 0, 20000))
    ids, logprobs = draw(logits.expand(20000, 5), noise, torch.ones(20000))
    wanted = torch.softmax(logits, -1)
    assert torch.allclose(torch.bincount(ids, minlength=5) / 20000, wanted, atol=0.015)
    assert 1 not in ids and logprobs[0] == pytest.approx(wanted.log()[ids[0]].item(), abs=1e-6)


def test_rows_of_one_draw_have_their_own_temperatures():
    logits = torch.tensor([0.5, 2.0, 1.9])
    noise = torch.full((3,), 0.99, dtype=torch.float64)
    ids, logprobs = draw(logits.expand(3, 3), noise, torch.tensor([1.0, 0.0, 0.01]))
    assert ids.tolist() == [2, 1, 1], "the last one's second choice is not within its reach"
    assert logprobs[1] == pytest.approx(torch.log_softmax(logits, -1)[1].item(), abs=1e-6)


@pytest.mark.parametrize("steps", [3, 8])
def test_steps_without_a_look_at_their_tokens_give_the_same_completions(policy, steps):
    """Sequences that stop, end by their length or fill the context, and others that join meanwhile."""
    asked = prompts(9)
    first = serve(LocalEngine(policy, threads=1, batch=1), [(asked[0], SamplingParams(30, seed=0))])[0]
    stop = (first.ids[10],)
    assert first.ids.index(first.ids[10]) % steps != steps - 1, "it stops within a call of ``sample``"
    jobs = [(p, SamplingParams(20 + 3 * n, seed=n, stop_ids=stop)) for n, p in enumerate(asked)]
    jobs += [([1] * 115, SamplingParams(50, seed=9)), ([2] * 127, SamplingParams(5, seed=10))]
    found = []
    for most in (1, steps):
        engine = LocalEngine(policy, threads=1, batch=4)
        engine._decoder.most_steps = most
        found.append(serve(engine, jobs))
        asyncio.run(engine.close())
    assert [(c.ids, c.finish) for c in found[0]] == [(c.ids, c.finish) for c in found[1]]
    assert {c.finish for c in found[0]} == {"stop", "length"}
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_new_weights_are_served_from_the_next_call_on(engine, policy):
    changed = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    prompt, params = prompts(1)[0], SamplingParams(max_tokens=25, seed=0)

    async def script():
        under_way = [asyncio.ensure_future(engine.generate(prompt, params)) for _ in range(2)]
        while not engine.counts.prefilled:  # both join the same batch
            await asyncio.sleep(0)
        await engine.update_from(changed, 1)
        after = await engine.generate(prompt, params)
        await engine.update_from(policy, 2)
        return await asyncio.gather(*under_way), after, await engine.generate(prompt, params)

    before, after, back = asyncio.run(script())
    for completion, model, version in [
        (before[0], policy, 0),
        (before[1], policy, 0),
        (after, changed, 1),
        (back, policy, 2),
    ]:
        assert completion.version == version
        np.testing.assert_allclose(completion.logprobs, reference(model, prompt, completion.ids), atol=1e-4)


def test_what_waits_for_a_row_during_a_change_gets_the_new_weights(policy, tmp_path):
    changed = copy.deepcopy(policy)
    with torch.no_grad():
        changed.lm_head.weight.add_(0.05 * torch.randn_like(changed.lm_head.weight))
    engine = LocalEngine(policy, threads=1, batch=2, lease=Lease(tmp_path))
    asked = prompts(3)

    async def script():
        with Lease(tmp_path).timing():  # holds the worker while the first two have their rows
            jobs = [asyncio.ensure_future(engine.generate(prompt, SamplingParams(25, seed=0))) for prompt in asked]
            while not engine.counts.prefilled:
                await asyncio.sleep(0)
            change = asyncio.ensure_future(engine.update_from(changed, 1))
            await asyncio.sleep(0)
        await change
        return await asyncio.gather(*jobs)

    completions = asyncio.run(script())
    assert [completion.version for completion in completions] == [0, 0, 1]
    for model, prompt, completion in zip([policy, policy, changed], asked, completions, strict=True):
        np.testing.assert_allclose(completion.logprobs, reference(model, prompt, completion.ids), atol=1e-4)
    asyncio.run(engine.close())


def test_stale_weights_fail_loudly(engine, policy, monkeypatch):
    monkeypatch.setattr(engine._decoder, "take", lambda model: True)
    changed = copy.deepcopy(policy)
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    with pytest.raises(EngineError, match="differ"):
        asyncio.run(engine.update_from(changed, 1))
    with pytest.raises(EngineError, match="failed"):
        serve(engine, [([1], SamplingParams(max_tokens=1, seed=0))])


def test_a_model_of_another_shape_makes_a_new_decoder(engine, policy):
    old = engine._decoder
    shallow = copy.deepcopy(policy)
    shallow.model.layers = shallow.model.layers[:1]
    asyncio.run(engine.update_from(shallow, 1))
    assert engine._decoder is not old
    prompt = prompts(1)[0]
    (completion,) = serve(engine, [(prompt, SamplingParams(max_tokens=9, seed=3))])
    np.testing.assert_allclose(completion.logprobs, reference(shallow, prompt, completion.ids), atol=1e-4)


def test_training_the_model_in_place_does_not_leak_into_the_engine(policy):
    model = copy.deepcopy(policy)
    engine = LocalEngine(model, threads=1, batch=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    prompt = prompts(1)[0]
    (completion,) = serve(engine, [(prompt, SamplingParams(max_tokens=5, seed=0))])
    np.testing.assert_allclose(completion.logprobs, reference(policy, prompt, completion.ids), atol=1e-4)
    asyncio.run(engine.close())


def test_a_cancelled_request_frees_its_row(policy, tmp_path):
    engine = LocalEngine(policy, threads=1, batch=4, lease=Lease(tmp_path))

    async def script():
        with Lease(tmp_path).timing():  # holds the worker while all four are in the batch
            jobs = [asyncio.ensure_future(engine.generate(p, SamplingParams(30, seed=0))) for p in prompts(4)]
            await asyncio.sleep(0.02)
            jobs[1].cancel()
            await asyncio.wait(jobs[1:2])  # the engine knows of it before it decodes again
        done = await asyncio.gather(*jobs, return_exceptions=True)
        return done, await engine.generate([1, 2], SamplingParams(3, seed=0))

    done, after = asyncio.run(script())
    assert [isinstance(result, asyncio.CancelledError) for result in done] == [False, True, False, False]
    assert len(after.ids) == 3 and engine.counts.sampled < 3 * 30 + 3 + 30
    asyncio.run(engine.close())


def test_prompts_are_computed_in_groups_by_new_tokens_and_by_tokens_that_they_see():
    jobs = [
        (row, start, [1] * new) for row, (start, new) in enumerate([(0, 6), (0, 4), (50, 1), (30, 1), (0, 12), (99, 1)])
    ]
    groups = [[row for row, _, _ in group] for group in local._chunks(jobs, 10, 70)]
    assert groups == [[0, 1], [2], [3], [4], [5]]
    assert [row for group in local._chunks(jobs, 100, 1000) for row, _, _ in group] == [0, 1, 2, 3, 4, 5]


def test_the_context_is_a_limit(engine):
    (completion,) = serve(engine, [([1] * 120, SamplingParams(max_tokens=50, seed=0))])
    assert len(completion.ids) == 128 - 120 and completion.finish == "length"
    with pytest.raises(ValueError, match="no room"):
        serve(engine, [([1] * 128, SamplingParams(max_tokens=1, seed=0))])


def test_decoding_waits_while_a_time_is_taken(policy, tmp_path):
    lease = AskedLease(tmp_path)
    engine = LocalEngine(policy, threads=1, batch=2, lease=lease)

    async def script():
        lease.asked.clear()
        with Lease(tmp_path).timing():
            job = asyncio.ensure_future(engine.generate([1, 2, 3], SamplingParams(60, seed=0)))
            await asyncio.to_thread(lease.asked.wait)
            steps = engine.counts.steps
            await asyncio.sleep(0.05)
            assert engine.counts.steps == steps and not job.done()
        await job

    asyncio.run(script())
    assert engine.counts.waited >= 0.04 and engine.counts.seconds > 0
    asyncio.run(engine.close())


class Leased(TorchDispatchMode):
    """Collects the operators that run in its thread while the lease of a folder is free."""

    def __init__(self, folder):
        super().__init__()
        Lease(folder).close()
        self.lock, self.free = os.open(folder / "lease.lock", os.O_RDWR), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # the engine holds it
        else:
            fcntl.flock(self.lock, fcntl.LOCK_UN)
            self.free.append(str(func))
        return func(*args, **(kwargs or {}))


def test_all_that_the_engine_computes_it_computes_under_the_lease(policy, tmp_path):
    """Prompts, kept prefixes, equal prompts, rows that end and rows that are cancelled."""
    engine, seen = LocalEngine(policy, threads=1, batch=4, lease=Lease(tmp_path)), Leased(tmp_path)
    asked = [[1, 2, 3, 4], [1, 2, 3, 4], *prompts(3)]

    async def script():
        await engine.compute(seen.__enter__)
        for _ in range(2):
            jobs = [
                asyncio.ensure_future(engine.generate(p, SamplingParams(6 + n, seed=n))) for n, p in enumerate(asked)
            ]
            await asyncio.sleep(0.01)
            jobs[2].cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        await engine.compute(lambda: seen.__exit__(None, None, None))

    asyncio.run(script())
    asyncio.run(engine.close())
    assert engine.counts.reused and seen.free == []


def test_a_closed_engine_refuses(policy):
    engine = LocalEngine(policy, threads=1, batch=2)

    async def script():
        job = asyncio.ensure_future(engine.generate([1], SamplingParams(100, seed=0)))
        await asyncio.sleep(0)  # submitted; the batch is not closed yet
        await engine.close()
        with pytest.raises(asyncio.CancelledError):
            await job
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([1], SamplingParams(1, seed=0))

    asyncio.run(script())


def test_an_engine_in_bfloat16_turns_positions_as_the_float32_model_does(policy):
    half = copied(policy, policy.device, torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16} and policy.dtype == torch.float32
    exact, rounded = (DenseDecoder(model, 2).rotations for model in (policy, half))
    assert torch.equal(exact, rounded)
