"""Adapters: what is frozen, what the merged weights are, and what other programs find in a folder."""

import json

import pytest
import torch

from cuda_agent.errors import PolicyError
from cuda_agent.policy.engines.vllm import _fingerprint
from cuda_agent.policy.lora import ADAPTER, Adapted, adapters, attach, merged_parameters, save_adapter
from cuda_agent.policy.model import load_model, load_policy, save_policy
from tests.policy.adapters import merge_adapter

TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])


def with_adapters(model, seed=0):
    """As training would leave it: no change is zero any more."""
    attach(model, 4, 8.0, TARGETS, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for layer in adapters(model).values():
            layer.up.copy_(0.2 * torch.randn(layer.up.shape, generator=generator))
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture
def folder(policy, tokenizer, tmp_path):
    save_policy(policy, tokenizer, tmp_path / "base")
    return tmp_path / "base"


def test_new_adapters_change_nothing_and_are_all_that_is_trained(folder, policy):
    model = load_model(folder)
    attach(model, 4, 8.0, TARGETS)
    torch.testing.assert_close(logits(model), logits(policy), rtol=0, atol=0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    layers = len(model.model.layers)
    assert len(trained) == 2 * len(TARGETS) * layers
    assert all(name.endswith((".down", ".up")) for name in trained)


def test_the_same_seed_gives_the_same_adapters(folder):
    first, again, other = (load_model(folder) for _ in range(3))
    for model, seed in ((first, 3), (again, 3), (other, 4)):
        attach(model, 4, 8.0, TARGETS, seed)
    name = "model.layers.1.self_attn.q_proj"
    assert torch.equal(adapters(first)[name].down, adapters(again)[name].down)
    assert not torch.equal(adapters(first)[name].down, adapters(other)[name].down)


def test_a_layers_weight_is_the_merged_one(folder):
    for layer in adapters(with_adapters(load_model(folder))).values():
        states = torch.randn(3, layer.base.in_features)
        torch.testing.assert_close(states @ layer.weight.T, layer(states), rtol=1e-5, atol=1e-5)
        assert not layer.weight.requires_grad


def test_merged_parameters_have_the_names_of_the_model_without_adapters(folder):
    plain, model = load_model(folder), with_adapters(load_model(folder))
    merged = dict(merged_parameters(model))
    assert list(merged) == [name for name, _ in plain.named_parameters()]
    for name, parameter in plain.named_parameters():
        parameter.data = merged[name].detach()
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)


def test_new_adapters_change_no_fingerprint_of_the_served_weights(folder):
    """vLLM serves merged weights: a check that compared names would miss a change that there is not."""
    model = load_model(folder)
    before = _fingerprint(model)
    attach(model, 4, 8.0, TARGETS)
    assert _fingerprint(model) == before
    assert _fingerprint(with_adapters(load_model(folder)))[0] != before[0]


def test_a_saved_policy_is_the_merged_one_and_the_adapter_lies_beside_it(folder, tokenizer, tmp_path):
    model = with_adapters(load_model(folder))
    save_policy(model, tokenizer, tmp_path / "trained")
    merged, _ = load_policy(tmp_path / "trained")
    assert not adapters(merged)
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-5, atol=1e-5)
    base = load_model(folder)
    merge_adapter(base, tmp_path / "trained" / ADAPTER)
    torch.testing.assert_close(logits(base), logits(model), rtol=1e-5, atol=1e-5)
    assert adapters(model), "the model that is trained keeps them"


def test_peft_loads_the_adapter(folder, tmp_path):
    peft = pytest.importorskip("peft")
    model = with_adapters(load_model(folder))
    save_adapter(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(load_model(folder), tmp_path / "adapter")
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-5, atol=1e-5)


def test_a_target_that_names_no_layer_is_told_with_those_that_do(folder):
    with pytest.raises(PolicyError, match=r"no linear layers called qkv_proj, but .*q_proj"):
        attach(load_model(folder), 4, 8.0, ["q_proj", "qkv_proj"])


def test_a_model_without_adapters_has_none_to_save(policy, tmp_path):
    with pytest.raises(PolicyError, match="no adapters"):
        save_adapter(policy, tmp_path)


def test_biases_stay_with_their_layers():
    base = torch.nn.Linear(6, 5)
    layer = Adapted(base, 2, 4.0, torch.Generator().manual_seed(0))
    torch.nn.init.normal_(layer.up)
    states = torch.randn(3, 6)
    torch.testing.assert_close(states @ layer.weight.T + layer.bias, layer(states))


def test_another_kind_of_adapter_is_refused(folder, tmp_path):
    save_adapter(with_adapters(load_model(folder)), tmp_path / "adapter")
    settings = tmp_path / "adapter" / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"use_dora": True}))
    with pytest.raises(PolicyError, match="use_dora"):
        merge_adapter(load_model(folder), tmp_path / "adapter")
