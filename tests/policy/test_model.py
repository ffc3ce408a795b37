import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from cuda_agent.config import PolicyConfig
from cuda_agent.errors import PolicyError
from cuda_agent.policy.model import load_policy, new_policy, save_policy, train_tokenizer


@pytest.fixture(scope="module")
def folder(policy, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    save_policy(policy, tokenizer, path)
    return path


@pytest.fixture
def broken(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "policy")


def test_a_policy_survives_its_folder(folder, policy, tokenizer):
    model, loaded = load_policy(folder)
    ids = tokenizer.encode("void f(long n) {}")
    assert loaded.encode("void f(long n) {}") == ids and loaded.chat_template == tokenizer.chat_template
    assert torch.equal(model(torch.tensor([ids])).logits, policy(torch.tensor([ids])).logits)
    assert model.config.tie_word_embeddings and not model.training


def test_weights_depend_on_the_seed_alone(tokenizer):
    small = PolicyConfig(layers=1, hidden=16, heads=2, kv_heads=1, intermediate=16)
    state = torch.random.get_rng_state()
    first, again, other = (new_policy(small, tokenizer, seed).lm_head.weight for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_tokenizer_has_the_size_asked_for():
    text = " ".join(chr(97 + i % 26) * (1 + i % 7) for i in range(200))
    assert len(train_tokenizer([text], 300)) == 300
    with pytest.raises(ValueError, match=r"policy\.vocab is 100"):
        train_tokenizer(["x"], 100)


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer*", "no tokenizer"),
        ("chat_template.jinja", "no chat template"),
    ],
)
def test_what_is_missing_is_named(broken, remove, message):
    for path in broken.glob(remove):
        path.unlink()
    with pytest.raises(PolicyError, match=message):
        load_policy(broken)


def test_everything_missing_is_named_at_once(tmp_path):
    with pytest.raises(PolicyError, match=r"no config\.json; no tokenizer .*; no weights"):
        load_policy(tmp_path)
    with pytest.raises(PolicyError, match="there is no folder"):
        load_policy(tmp_path / "nowhere")


def test_a_missing_shard_is_named(broken):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PolicyError, match="no weight shards model-00001-of-00002"):
        load_policy(broken)


def test_weights_are_never_filled_with_noise(broken):
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PolicyError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj"):
        load_policy(broken)


def test_a_tokenizer_larger_than_the_model_is_refused(broken):
    big = train_tokenizer([" ".join(chr(97 + i % 26) * (1 + i % 7) for i in range(400))], 400)
    big.save_pretrained(broken)
    with pytest.raises(PolicyError, match="embeddings"):
        load_policy(broken)


def test_a_line_may_be_one_token_and_its_numbers_stay_apart():
    line = "    for (long i = block; i < n; i += grid) {\n"
    tokenizer = train_tokenizer([line + f"    v = v + {i}.5f;\n" for i in range(40)], 600)
    assert len(tokenizer.encode(line)) == 1
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("    v = v + 12.5f;\n")]
    assert pieces == ["    v = v +", " 12", ".", "5", "f;\n"]
