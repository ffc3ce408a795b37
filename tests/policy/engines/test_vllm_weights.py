"""Where a broadcast of weights takes place."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from cuda_agent.policy.engines import vllm_weights
from cuda_agent.policy.engines.engine import EngineError
from cuda_agent.policy.engines.vllm_weights import Broadcast


def replica(device: str) -> SimpleNamespace:
    async def call(method, **arguments):
        return None

    return SimpleNamespace(url="http://127.0.0.1:1", device=device, dtype="bfloat16", workers=1, call=call)


def model(device: str = "cpu"):
    made = torch.nn.Linear(2, 2, device=device)
    made.device = torch.device(device)
    return made


@pytest.fixture
def groups(monkeypatch):
    """(the group's device, the tensors that it sends); a meta device stands for a GPU."""
    made = []

    def group(store, host, rank, size, device):
        sent = []
        made.append((device, sent))
        return SimpleNamespace(broadcast=lambda tensors: sent.extend(tensors) or SimpleNamespace(wait=lambda: None))

    monkeypatch.setattr(vllm_weights, "transfer_store", lambda *_: SimpleNamespace(port=1))
    monkeypatch.setattr(vllm_weights, "transfer_group", group)
    return made


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_weights_are_copied_to_the_servers_kind_of_device_wherever_the_model_is(groups, place):
    asyncio.run(Broadcast().send([replica("meta"), replica("meta")], model(place)))
    ((device, sent),) = groups
    assert device == "meta" and [(t.device.type, t.dtype) for t in sent] == [("meta", torch.bfloat16)] * 2


@pytest.mark.parametrize("devices", [["cuda"], ["cpu", "cuda"]])
def test_servers_that_no_broadcast_reaches_are_told_apart(groups, monkeypatch, devices):
    monkeypatch.setattr(vllm_weights, "gpus", lambda: len(devices) - 1)
    with pytest.raises(EngineError, match=r"servers on (cpu, )?cuda: sync=disk can"):
        asyncio.run(Broadcast().send([replica(device) for device in devices], model()))
    assert not groups
