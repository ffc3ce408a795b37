import asyncio

import pytest

from cuda_agent.agent.prompt import agent_messages
from cuda_agent.config import SandboxConfig
from cuda_agent.policy.chat import Chat
from cuda_agent.policy.model import train_tokenizer
from cuda_agent.sandbox.local import LocalSandbox
from tests import made_once
from tests.agent.agent_cases import CODE, KERNEL, PLAN, TASK


@pytest.fixture(scope="session")
def chat():
    texts = [
        CODE,
        KERNEL,
        PLAN,
        str(agent_messages(TASK, "compact")),
        "verify: ok wrong build error profile: eager compile",
    ]
    return Chat(train_tokenizer(texts, 420), "compact")


@pytest.fixture(scope="session")
def loop():
    """Yields one event loop for all tests, so that the sandbox starts once."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def sandbox(loop, tmp_path_factory):
    sandbox = LocalSandbox(SandboxConfig(clock="model"), made_once.share(tmp_path_factory.mktemp("cache")))
    loop.run(sandbox.__aenter__())
    yield sandbox
    loop.run(sandbox.__aexit__(None, None, None))
