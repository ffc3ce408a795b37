"""The scripted engine of drills: the teacher's dialogues under the log-probabilities of a real policy."""

import asyncio
import random

import pytest
import torch

from cuda_agent.agent.prompt import agent_messages
from cuda_agent.config import PolicyConfig
from cuda_agent.policy.chat import Chat
from cuda_agent.policy.engines.engine import SamplingParams
from cuda_agent.policy.model import new_policy, train_tokenizer
from cuda_agent.rl.scripted import ScriptedEngine
from cuda_agent.synthesis.teacher.family import sample_task

SIZES = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 32, "context": 8192}


@pytest.fixture
def played():
    """An engine, and the prompt of its only task."""
    chat = Chat(train_tokenizer(["float v = x[i];"] * 8, 320), "compact")
    task = sample_task(random.Random(0))
    model = new_policy(PolicyConfig(**SIZES), chat.tokenizer, 0)
    return ScriptedEngine(chat, [task], model), chat, chat.prompt_ids(agent_messages(task, "compact"))


def test_an_episode_continues_the_dialogue_that_it_began(played):
    engine, chat, prompt = played
    params = SamplingParams(4000, seed=3, stop_ids=chat.stop_ids)
    ids, said = list(prompt), []
    for _ in range(12):
        completion = asyncio.run(engine.generate(ids, params))
        assert completion.finish == "stop"
        said.append(chat.parse(completion.ids)[0])
        ids += [*completion.ids, *chat.delta_ids(["ok"])]
    assert said[-1] == "done" and said[0] != "done"


def test_logprobs_and_version_are_those_of_the_model(played):
    engine, _, prompt = played
    asyncio.run(engine.update_from(engine._model, 4))
    completion = asyncio.run(engine.generate(prompt, SamplingParams(9, seed=0)))
    assert (len(completion.ids), completion.finish, completion.version) == (9, "length", 4)
    with torch.no_grad():
        logits = engine._model(torch.tensor([[*prompt, *completion.ids]])).logits[0, len(prompt) - 1 : -1]
    wanted = torch.log_softmax(logits, -1).gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), wanted, atol=1e-5, rtol=0)


def test_on_a_gpu_it_writes_cuda():
    chat = Chat(train_tokenizer(["float v = x[i];"] * 8, 320), "compact")
    task = sample_task(random.Random(0), "cuda")
    engine = ScriptedEngine(chat, [task], new_policy(PolicyConfig(**SIZES), chat.tokenizer, 0), "cuda")
    prompt = chat.prompt_ids(agent_messages(task, "compact"))
    said = chat.tokenizer.decode(asyncio.run(engine.generate(prompt, SamplingParams(4000, seed=1))).ids)
    assert "kernels/fused.cu" in said and "__global__" in said
