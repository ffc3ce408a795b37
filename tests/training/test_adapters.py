"""Training adapters instead of all weights: what changes, what is kept in a checkpoint, and that it learns."""

import pytest
import torch
from safetensors import safe_open
from training_cases import VOCAB, random_episode, tiny_policy

from cuda_agent.config import CriticConfig, Ppo
from cuda_agent.policy.engines.local import LocalEngine
from cuda_agent.policy.lora import attach, merged_parameters
from cuda_agent.training import recipes
from cuda_agent.training.checkpoint import CorruptCheckpoint
from cuda_agent.training.critic import Critic, load_critic, save_critic
from cuda_agent.training.packing import batch_of, tokens_of, tokens_of_episode
from cuda_agent.training.trainer import Trainer

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def policy(rank: int = 4, **options) -> Trainer:
    model = tiny_policy()
    attach(model, rank, 8.0, TARGETS)
    return Trainer(model, row_tokens=256, **options)


def critic() -> Trainer:
    model = Critic(tiny_policy(1).model)
    attach(model.trunk, 4, 8.0, TARGETS)
    return Trainer(model, row_tokens=256)


def memorise(trainer: Trainer, stop: int | None = None) -> list[float]:
    draw = torch.Generator().manual_seed(0)
    data = [tokens_of(torch.randint(VOCAB, (20,), generator=draw).tolist(), [0] * 4 + [1] * 16) for _ in range(20)]
    losses = []
    for metrics in recipes.sft(trainer, data, tokens_per_step=100, lr=3e-2, seed=3, epochs=6):
        losses.append(metrics["loss"])
        if trainer.step == stop:
            break
    return losses


def test_only_adapters_change_and_have_gradients_and_moments():
    actor = policy()
    before = {name: parameter.clone() for name, parameter in actor.model.named_parameters()}
    memorise(actor, stop=3)
    adapter = {name for name in before if name.endswith((".down", ".up"))}
    changed = {n for n, parameter in actor.model.named_parameters() if not torch.equal(parameter, before[n])}
    assert changed == adapter == {name for name, _ in actor.trained()}
    assert all((parameter.grad is not None) == (n in adapter) for n, parameter in actor.model.named_parameters())
    moments = sum(state["exp_avg"].numel() for optimizer in actor.optimizers for state in optimizer.state.values())
    assert moments == sum(before[name].numel() for name in adapter)


def test_imitation_learns():
    """What follows what, on sequences that were not trained on; the frozen output layer can tell tokens apart."""
    model = tiny_policy()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(20)
    attach(model, 8, 16.0, TARGETS)
    actor = Trainer(model, row_tokens=512)

    def counting(start: int):
        return tokens_of([(start + 5 * n) % VOCAB for n in range(16)], [0] * 4 + [1] * 12)

    unseen = [counting(start) for start in range(0, VOCAB, 6)]
    training = [counting(start) for start in range(VOCAB) if start % 6]
    before = recipes.sft_loss_of(actor, unseen)
    for _ in recipes.sft(actor, training, tokens_per_step=160, lr=1e-2, seed=0, epochs=8):
        pass
    assert recipes.sft_loss_of(actor, unseen) < 0.2 * before


def test_a_checkpoint_holds_the_adapters_alone_and_goes_on_exactly(tmp_path):
    whole = memorise(policy())
    cut = policy()
    begun = memorise(cut, stop=7)
    cut.save(tmp_path)
    with safe_open(tmp_path / "state.safetensors", "pt") as file:
        kept = set(file.keys())
    assert all(name.endswith((".down", ".up")) for name in kept - {"random", "step", "seconds"})
    resumed = policy()
    resumed.load(tmp_path)
    assert begun + memorise(resumed) == whole


@pytest.mark.parametrize("other", ["another rank", "no adapters"])
def test_a_checkpoint_of_other_adapters_is_refused(tmp_path, other):
    policy().save(tmp_path)
    fresh = policy(rank=8) if other == "another rank" else Trainer(tiny_policy(), row_tokens=256)
    with pytest.raises(CorruptCheckpoint):
        fresh.load(tmp_path)


def test_ppo_trains_policy_and_critic_through_their_adapters():
    actor, judge = policy(), critic()
    frozen = {name: parameter.clone() for name, parameter in judge.model.named_parameters()}
    metrics = recipes.ppo_update(actor, judge, [random_episode(i) for i in range(8)], Ppo(episodes_per_step=8), seed=0)
    assert metrics["grad_norm"] > 0 and metrics["critic_grad_norm"] > 0
    changed = {name for name, parameter in judge.model.named_parameters() if not torch.equal(parameter, frozen[name])}
    assert {"head.weight", "head.bias"} <= changed
    assert all(name.startswith("head.") or name.endswith((".down", ".up")) for name in changed)


def test_a_critics_folder_is_the_merged_one(tmp_path):
    judge = critic()
    data = [random_episode(seed) for seed in range(10)]
    recipes.value_epoch(judge, data, CriticConfig(lr=1e-2, tokens_per_step=256), seed=0, epoch=0)
    save_critic(judge.model, tmp_path)
    loaded = Trainer(load_critic(tmp_path), row_tokens=256)
    batch = batch_of(tokens_of_episode(episode) for episode in data)
    torch.testing.assert_close(loaded.flat(batch, loaded.values), judge.flat(batch, judge.values), rtol=0, atol=1e-5)
    assert len(list(loaded.model.parameters())) < len(list(judge.model.parameters()))


def test_the_in_process_engine_decodes_with_the_merged_weights():
    """It is given the model with its adapters, and proves by itself that it computes what that model computes."""
    actor = policy()
    memorise(actor, stop=3)
    engine = LocalEngine(actor.model, threads=1)
    engine._worker.shutdown()
    merged = tiny_policy()
    with torch.no_grad():
        for (_, plain), (_, ours) in zip(merged.named_parameters(), merged_parameters(actor.model), strict=True):
            plain.copy_(ours)
    ids = [3, 1, 4, 1, 5]
    wanted = merged(input_ids=torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(engine._decoder.prefill([(0, 0, ids)])[0], wanted, rtol=0, atol=1e-5)
