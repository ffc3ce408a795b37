import asyncio

import numpy as np
import torch

from cuda_agent.policy.engines.engine import SamplingParams
from cuda_agent.policy.engines.scripted import ScriptedEngine


def test_text_is_encoded_and_closed(tokenizer):
    engine = ScriptedEngine(lambda prompt, seed: f"seen {len(prompt)}", tokenizer)
    params = SamplingParams(max_tokens=50, seed=0, stop_ids=(tokenizer.eos_token_id,))
    completion = asyncio.run(engine.generate([1, 2, 3], params))
    assert tokenizer.decode(completion.ids) == "seen 3<|im_end|>"
    assert completion.finish == "stop" and completion.logprobs == [-1.0] * len(completion.ids)
    assert engine.calls == [[1, 2, 3]]


def test_answers_are_cut_at_their_budget():
    engine = ScriptedEngine(lambda prompt, seed: range(10))
    completion = asyncio.run(engine.generate([1], SamplingParams(max_tokens=4, seed=0, stop_ids=(9,))))
    assert completion.ids == [0, 1, 2, 3] and completion.finish == "length"


def test_logprobs_can_be_those_of_a_model(policy):
    engine = ScriptedEngine(lambda prompt, seed: [5, 6, 7], model=policy)
    completion = asyncio.run(engine.generate([1, 2], SamplingParams(max_tokens=9, seed=0)))
    with torch.no_grad():
        wanted = torch.log_softmax(policy(torch.tensor([[1, 2, 5, 6, 7]])).logits[0], -1)[[1, 2, 3], [5, 6, 7]]
    np.testing.assert_allclose(completion.logprobs, wanted.numpy(), atol=1e-6)


def test_updates_are_recorded():
    engine = ScriptedEngine(lambda prompt, seed: [1])
    asyncio.run(engine.update_from("somewhere", 4))
    completion = asyncio.run(engine.generate([1], SamplingParams(max_tokens=1, seed=0)))
    assert completion.version == 4 and engine.updates == [(4, "somewhere")]
