"""The vLLM engine on GPUs, in bfloat16: new weights by disk on one, broadcast from one to another.

Needs an environment with vLLM: this one, or that of the interpreter which CUDA_AGENT_VLLM_PYTHON names."""

import asyncio

import numpy as np
import pytest
import torch
from vllm_cases import config_of, reference, write_policy

from cuda_agent.errors import PolicyError
from cuda_agent.policy.engines.engine import EngineError, SamplingParams
from cuda_agent.policy.engines.vllm import open_vllm
from cuda_agent.policy.engines.vllm_server import Replica, interpreter

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]


@pytest.fixture(scope="module")
def policies(tokenizer, tmp_path_factory):
    """(folder, model on the first GPU) of two policies of one shape."""
    try:
        interpreter()
    except PolicyError as error:
        pytest.skip(str(error))
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    return [(folder, write_policy(folder, tokenizer, seed).to("cuda")) for seed, folder in enumerate(folders)]


@pytest.mark.parametrize("sync", ["disk", "nccl"])
def test_new_weights_are_served_and_stale_ones_found_out(policies, tmp_path, monkeypatch, sync):
    if sync == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("a broadcast needs a GPU for the trainer and one for the server")
    (folder, first), (_, second) = policies
    prompts = [[(31 * i + 7 * j) % 256 for j in range(12)] for i in range(16)]
    call = Replica.call

    async def lazy(self, method, **arguments):
        idle = method in ("cuda_agent_load", "cuda_agent_receive")
        return await call(self, "cuda_agent_weights" if idle else method, **({} if idle else arguments))

    async def script():
        config = config_of(sync=sync, batch=16, gpu_memory=0.3)
        async with open_vllm(folder, first, tmp_path, config) as engine:
            for version, model in enumerate([first, second, first], 1):
                await engine.update_from(model, version)
                jobs = (engine.generate(prompt, SamplingParams(60, seed=version)) for prompt in prompts)
                for prompt, completion in zip(prompts, await asyncio.gather(*jobs), strict=True):
                    wanted = reference(model.float(), prompt, completion.ids)
                    assert completion.version == version
                    assert np.abs(np.array(completion.logprobs) - wanted).mean() < 0.05
            if sync == "disk":
                monkeypatch.setattr(Replica, "call", lazy)
                with pytest.raises(EngineError, match=r"does not serve the weights|still serves|has not changed"):
                    await engine.update_from(second, 4)

    asyncio.run(script())
