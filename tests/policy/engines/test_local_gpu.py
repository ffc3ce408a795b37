"""The in-process engine on a GPU: its recorded steps give what the model gives."""

import asyncio

import numpy as np
import pytest
import torch

from cuda_agent.config import PolicyConfig
from cuda_agent.lease import Lease
from cuda_agent.policy.engines.decoder import DenseDecoder
from cuda_agent.policy.engines.engine import SamplingParams
from cuda_agent.policy.engines.local import LocalEngine, copied
from cuda_agent.policy.model import new_policy

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def models(tokenizer):
    """Two of one shape, on the processor; far from uniform."""
    made = []
    for seed in (1, 2):
        model = new_policy(PolicyConfig(layers=3, hidden=128, heads=4, kv_heads=2, context=1024), tokenizer, seed)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        made.append(model)
    return made


def reference(model, prompt, ids):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), -1).gather(-1, torch.tensor(ids)[:, None])[:, 0].numpy()


async def sample(engine, vocab, lengths):
    jobs = [
        ([(31 * i + 7 * j) % vocab for j in range(20 + 3 * i)], SamplingParams(length, seed=i))
        for i, length in enumerate(lengths)
    ]
    return [
        (prompt, await completion)
        for prompt, completion in [(p, asyncio.ensure_future(engine.generate(p, s))) for p, s in jobs]
    ]


def test_every_batch_and_length_agrees_with_the_model_and_so_do_new_weights(models):
    first, second = models
    vocab = first.config.vocab_size

    async def script():
        engine = LocalEngine(first, batch=11, device="cuda")
        for model, version in ((first, 0), (second, 1), (first, 2)):
            if version:
                await engine.update_from(model, version)
            # Rows end one after the other, beyond what the cache first holds, and others come in between.
            for prompt, completion in await sample(
                engine, vocab, [300, 9, 150, 7, 260, 80, 31, 64, 2, 40, 500, 90, 33]
            ):
                assert completion.version == version
                np.testing.assert_allclose(completion.logprobs, reference(model, prompt, completion.ids), atol=1e-4)
        recorded = len(engine._decoder.graphs._recorded)
        await engine.close()
        return recorded

    assert asyncio.run(script()) > 3
    assert first.device.type == "cpu"


def test_half_precision_stays_near_the_model(models):
    async def script():
        engine = LocalEngine(models[0], batch=4, device="cuda", dtype="bfloat16")
        for prompt, completion in await sample(engine, models[0].config.vocab_size, [60, 70, 80]):
            assert np.abs(completion.logprobs - reference(models[0], prompt, completion.ids)).mean() < 0.1
        await engine.close()

    asyncio.run(script())


def test_the_lease_is_free_once_the_device_is_done(models, tmp_path):
    """A long kernel after the work, and a timer that waits for the lease."""

    async def script():
        engine = LocalEngine(models[0], batch=4, device="cuda", lease=Lease(tmp_path))
        done = torch.cuda.Event()

        def work():
            with engine._working():
                torch.cuda._sleep(2_000_000_000)
                done.record()

        await engine.compute(work)
        with Lease(tmp_path).timing():
            assert done.query()
        # Between two timings the device is idle whenever the lease is held for timing.
        job = asyncio.ensure_future(engine.generate([1, 2, 3], SamplingParams(200, seed=0)))
        for _ in range(20):
            with Lease(tmp_path).timing():
                assert torch.cuda.current_stream().query()
            await asyncio.sleep(0)
        await job
        await engine.close()

    asyncio.run(script())


def test_one_call_for_prompts_of_many_lengths_gives_what_one_call_for_each_gives(models):
    model, draw = copied(models[0], torch.device("cuda"), torch.bfloat16), np.random.default_rng(0)
    turns = [(0, 10), (3, 130), (1, 7), (2, 1)], [(3, 40), (0, 1), (4, 300), (1, 25)]  # row, number of new tokens
    found = []
    with torch.inference_mode():
        packed, each = DenseDecoder(model, 5), DenseDecoder(model, 5)
        assert packed.packed
        each.packed = False
        filled = dict.fromkeys(range(5), 0)
        for turn in turns:
            jobs = [(row, filled[row], draw.integers(0, 256, count).tolist()) for row, count in turn]
            filled |= {row: filled[row] + count for row, count in turn}
            found.append([torch.log_softmax(decoder.prefill(jobs), -1) for decoder in (packed, each)])
    for one, other in found:
        assert (one.exp() * (one - other).abs()).sum(-1).max() < 0.05
