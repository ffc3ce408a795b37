import pytest
import torch

from cuda_agent.config import PolicyConfig
from cuda_agent.policy.model import new_policy, train_tokenizer

CORPUS = [
    'for (long i = lo; i < hi; i++) y[i] = x[i] > 0 ? x[i] : 0.0f;\n{"nodes": [{"kernel": "kernels/fused.cpp"}]}\n',
    "You write fast kernels. Run compile, then verify, then profile.\nok: 3.1 ms against 4.5 ms eager\n",
]


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(CORPUS, 320)


@pytest.fixture(scope="session")
def policy(tokenizer):
    """Returns a small random model whose next-token distributions are far from uniform."""
    config = PolicyConfig(layers=2, hidden=32, heads=4, kv_heads=2, intermediate=48, context=128)
    model = new_policy(config, tokenizer, seed=1)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model
