"""The trainer on a tiny Qwen3: alignment, packing, where gradients go, checkpoints."""

import itertools
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_cases import VOCAB, random_episode, tiny_policy
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cuda_agent.config import CriticConfig, Ppo
from cuda_agent.lease import Lease
from cuda_agent.training import attention, recipes
from cuda_agent.training.checkpoint import CorruptCheckpoint
from cuda_agent.training.critic import Critic, critic_from_policy, load_critic, save_critic
from cuda_agent.training.losses import ppo_loss
from cuda_agent.training.packing import PackedRow, batch_of, tokens_of, tokens_of_episode
from cuda_agent.training.trainer import Trainer


def policy(**options) -> Trainer:
    return Trainer(tiny_policy(), row_tokens=256, **options)


def critic(**options) -> Trainer:
    model = Critic(tiny_policy(1).model)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    return Trainer(model, row_tokens=256, **options)


def episodes(count: int, actor: Trainer | None = None):
    """Random episodes; given an actor, with its own log-probabilities, as its engine would have written them."""
    made = [random_episode(seed) for seed in range(count)]
    if actor is not None:
        batch = batch_of(tokens_of_episode(episode) for episode in made)
        flat = iter(actor.flat(batch, lambda row: actor.logprobs(row)[0]).tolist())
        for episode in made:
            episode.logprobs = [next(flat) if sampled else 0.0 for sampled in episode.mask]
    return made


def test_logprobs_are_those_of_the_plain_model_one_sequence_at_a_time():
    actor = policy()
    batch = batch_of(tokens_of_episode(random_episode(seed)) for seed in range(6))
    flat = actor.flat(batch, lambda row: actor.logprobs(row)[0])
    plain = []
    for sequence in batch.sequences:
        with torch.no_grad():
            logits = actor.model(input_ids=sequence.ids[None]).logits[0]
        for position in sequence.mask.nonzero()[:, 0]:
            plain.append(logits[position - 1].log_softmax(-1)[sequence.ids[position]])
    assert torch.allclose(flat, torch.stack(plain), atol=1e-5)


def test_values_are_taken_from_the_same_states_as_logprobs():
    trainer = critic()
    batch = batch_of(tokens_of_episode(random_episode(seed)) for seed in range(4))
    flat = trainer.flat(batch, trainer.values)
    plain = []
    for sequence in batch.sequences:
        with torch.no_grad():
            states = trainer.trunk(input_ids=sequence.ids[None]).last_hidden_state[0]
            plain.append(trainer.model.head(states)[sequence.mask.nonzero()[:, 0] - 1, 0])
    assert torch.allclose(flat, torch.cat(plain), atol=1e-5)


@pytest.mark.parametrize("attention", ["packed", "masked"])
def test_packed_and_unpacked_losses_and_gradients_are_equal(attention):
    results = []
    for row_tokens in (256, 80):  # many sequences a row; about one a row
        actor, judge = policy(max_grad_norm=1e9), critic(max_grad_norm=1e9)
        actor._packed = judge._packed = attention == "packed"
        actor.row_tokens = judge.row_tokens = row_tokens
        data = episodes(12)
        batch = batch_of(tokens_of_episode(episode) for episode in data)
        sft = recipes.sft_step(actor, batch, 0.0)["loss"]
        update = recipes.ppo_update(
            actor, judge, data, Ppo(episodes_per_step=12, samples_per_prompt=1, minibatches=1, actor_lr=1e-9), seed=0
        )
        gradients = torch.cat([p.grad.flatten() for p in (*actor.model.parameters(), *judge.model.parameters())])
        results.append((sft, update["loss"], update["critic_loss"], gradients))
    for packed, unpacked in zip(results[0][:3], results[1][:3], strict=True):
        assert packed == pytest.approx(unpacked, abs=1e-5)
    assert torch.allclose(results[0][3], results[1][3], atol=1e-5)


@pytest.mark.parametrize("row_tokens", [256, 80])  # many sequences a row; about one a row
@pytest.mark.parametrize("mean", ["tokens", "trajectory"])
def test_the_policys_loss_is_a_mean_over_tokens_or_over_the_means_of_trajectories(mean, row_tokens):
    actor = policy()
    actor.row_tokens = row_tokens
    batch = batch_of(tokens_of_episode(random_episode(seed)) for seed in range(6))
    advantages = torch.randn(len(batch), generator=torch.Generator().manual_seed(0))
    flat = [actor.flat(batch, lambda row: actor.logprobs(row)[0]), batch.logprobs, batch.logprobs, advantages]
    limits, chosen = (0.2, 0.28, 2.0), [0, 2, 3, 5]
    parts = list(zip(*(tensor.split(batch.counts) for tensor in flat), strict=True))
    counts = [batch.counts[index] for index in chosen]
    means = torch.stack([ppo_loss(*parts[index], batch.counts[index], *limits)[0] for index in chosen])
    weights = torch.tensor(counts) / sum(counts) if mean == "tokens" else torch.full((4,), 1 / 4)
    settings = Ppo(loss_mean=mean, actor_lr=1e-9)
    loss = recipes.actor_step(actor, batch, chosen, batch.logprobs, advantages, settings, 1.0)["loss"]
    assert len(set(counts)) > 1 and loss == pytest.approx(float((weights * means).sum()), abs=1e-5)


@pytest.mark.parametrize(("rise", "rates"), [(0, [1.0, 1.0, 1.0]), (2, [0.5, 1.0, 1.0]), (4, [0.25, 0.5, 0.75])])
def test_the_policys_learning_rate_rises_over_its_first_steps_also_after_a_resume(rise, rates, tmp_path):
    actor, settings = policy(), Ppo(actor_lr=1e-3, lr_rise=rise)
    (tmp_path / "actor").mkdir()
    batch = batch_of(tokens_of_episode(random_episode(seed)) for seed in range(2))
    taken = []
    for _ in range(3):
        recipes.actor_step(actor, batch, [0, 1], batch.logprobs, torch.ones(len(batch)), settings, 1.0)
        taken.append(actor.optimizers[0].param_groups[0]["lr"] / settings.actor_lr)
        actor.save(tmp_path / "actor")
        actor = policy()
        actor.load(tmp_path / "actor")
    assert taken == pytest.approx(rates)


def test_rows_side_by_side_give_the_same_steps_as_one_after_the_other_each_time():
    results = []
    for workers in (1, 3, 3):
        actor, judge = policy(), critic()
        actor.workers = judge.workers = workers
        metrics = recipes.ppo_update(
            actor, judge, episodes(12), Ppo(episodes_per_step=12, samples_per_prompt=1, actor_lr=1e-9), seed=0
        )
        gradients = torch.cat([p.grad.flatten() for p in (*actor.parameters, *judge.parameters)])
        results.append((metrics["loss"], metrics["critic_loss"], gradients))
    one, several, again = results
    assert several[:2] == pytest.approx(one[:2], abs=1e-5)
    assert torch.allclose(one[2], several[2], atol=1e-5)
    assert several[:2] == again[:2] and torch.equal(several[2], again[2])


def test_rows_side_by_side_leave_the_number_of_threads_alone():
    torch.set_num_threads(2)
    actor = policy()
    assert actor.workers == 2
    memorise(actor, stop=1)
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert torch.get_num_threads() == 2 and later == [2]


def states_gradient(actor: Trainer, batch) -> tuple[torch.Tensor, PackedRow]:
    """Gradient of the loss in the last hidden state of every token of the row."""
    (row,) = batch.rows(actor.row_tokens)
    seen = {}

    def keep(_, __, output):
        output.last_hidden_state.retain_grad()
        seen["hidden"] = output.last_hidden_state

    handle = actor.trunk.register_forward_hook(keep)
    recipes.sft_step(actor, batch, 0.0)
    handle.remove()
    return seen["hidden"].grad[0], row


def test_no_gradient_reaches_a_state_that_predicts_a_tool_or_prompt_token():
    actor = policy()
    batch = batch_of(tokens_of_episode(random_episode(seed)) for seed in range(5))
    gradient, row = states_gradient(actor, batch)
    predicting = torch.zeros(len(row.ids), dtype=torch.bool)
    predicting[row.before] = True
    assert (gradient[~predicting] == 0).all()
    assert (gradient[predicting].abs().sum(-1) > 0).all()


def test_the_gradient_in_the_logits_is_exactly_zero_before_tool_tokens():
    """The same with logits of every position: the trainer's loss is the masked loss, and its gradients are equal."""
    actor = policy(max_grad_norm=1e9)
    episode = random_episode(3)
    batch = batch_of([tokens_of_episode(episode)])
    recipes.sft_step(actor, batch, 0.0)
    ours = [parameter.grad.clone() for parameter in actor.model.parameters()]

    actor.model.zero_grad()
    logits = actor.model(input_ids=torch.tensor([episode.ids])).logits[0]
    logits.retain_grad()
    mask = torch.tensor(episode.mask[1:], dtype=torch.bool)
    picked = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(episode.ids[1:])[:, None])[:, 0]
    (-(picked * mask).sum() / mask.sum()).backward()
    assert (logits.grad[:-1][~mask] == 0).all() and (logits.grad[-1] == 0).all()
    for parameter, gradient in zip(actor.model.parameters(), ours, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-5)


def test_what_a_tool_said_changes_nothing_before_it_and_sequences_of_a_row_do_not_see_each_other():
    actor = policy()
    pair = [random_episode(1), random_episode(2)]
    batch = batch_of(tokens_of_episode(episode) for episode in pair)
    before = actor.flat(batch, lambda row: actor.logprobs(row)[0])
    tool = max(index for index, sampled in enumerate(pair[0].mask) if not sampled)
    pair[0].ids[tool] = (pair[0].ids[tool] + 1) % VOCAB
    after = actor.flat(batch_of(tokens_of_episode(e) for e in pair), lambda row: actor.logprobs(row)[0])
    earlier = sum(pair[0].mask[:tool])
    assert torch.equal(before[:earlier], after[:earlier])
    assert not torch.equal(before[earlier : batch.counts[0]], after[earlier : batch.counts[0]])
    assert torch.equal(before[batch.counts[0] :], after[batch.counts[0] :])


def test_on_policy_the_first_minibatch_has_ratio_one_and_later_ones_do_not():
    actor, judge = policy(), critic()
    data = episodes(16, actor)
    one = recipes.ppo_update(policy(), judge, data, Ppo(episodes_per_step=16, minibatches=1, actor_lr=1e-2), seed=0)
    assert one["ratio_max"] == pytest.approx(1, abs=1e-4) and one["train_inference_mismatch"] == pytest.approx(
        0, abs=1e-5
    )
    assert one["clip_low"] == one["clip_high"] == 0
    two = recipes.ppo_update(
        actor, critic(), data, Ppo(episodes_per_step=16, minibatches=4, epochs=2, actor_lr=1e-2), seed=0
    )
    assert two["ratio_max"] > 1.28 and two["clip_low"] + two["clip_high"] > 0 and two["kl"] > 0


def test_clipping_changes_what_is_learnt_off_policy():
    weights = []
    for high in (0.28, 50.0):
        actor = policy()
        data = episodes(16, actor)
        settings = Ppo(episodes_per_step=16, minibatches=4, epochs=2, actor_lr=1e-2, clip_high=high)
        recipes.ppo_update(actor, critic(), data, settings, seed=0)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in actor.model.parameters()]))
    assert not torch.equal(*weights)


def test_recomputed_denominators_start_at_ratio_one_whatever_the_engine_said():
    actor = policy()
    data = episodes(8)  # the engine's log-probabilities are random: nothing like the actor's
    settings = Ppo(episodes_per_step=8, minibatches=2, actor_lr=1e-9, behavior_logprobs="trainer")
    metrics = recipes.ppo_update(actor, critic(), data, settings, seed=0)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-3)
    assert metrics["train_inference_mismatch"] > 0.5 and metrics["importance_mean"] != pytest.approx(1, abs=1e-2)


def test_ppo_makes_rewarded_tokens_likelier():
    actor, judge = policy(), critic()
    data = episodes(24, actor)
    for episode in data:
        episode.reward = 3.0 if episode.ids[-1] % 2 else -1.0
    batch = batch_of(tokens_of_episode(episode) for episode in data)
    before = actor.flat(batch, lambda row: actor.logprobs(row)[0]).split(batch.counts)
    for seed in range(5):
        recipes.ppo_update(actor, judge, data, Ppo(episodes_per_step=24, actor_lr=3e-3, critic_lr=1e-2), seed=seed)
    after = actor.flat(batch, lambda row: actor.logprobs(row)[0]).split(batch.counts)
    gains = [float((new - old).mean()) for new, old in zip(after, before, strict=True)]
    good = [gain for gain, episode in zip(gains, data, strict=True) if episode.reward == 3.0]
    bad = [gain for gain, episode in zip(gains, data, strict=True) if episode.reward == -1.0]
    assert sum(good) / len(good) > sum(bad) / len(bad)


def test_episodes_without_a_reward_are_dropped_and_counted():
    actor, judge = policy(), critic()
    data = episodes(6)
    data[0].reward = data[4].reward = None
    metrics = recipes.ppo_update(actor, judge, data, Ppo(episodes_per_step=8), seed=0)
    assert (metrics["episodes"], metrics["dropped"]) == (4, 2)
    assert actor.step == judge.step == 2
    for episode in data:
        episode.reward = None
    assert recipes.ppo_update(actor, judge, data, Ppo(episodes_per_step=8), seed=0) == {"episodes": 0, "dropped": 6}
    assert actor.step == 2


def test_a_critic_that_warms_up_leaves_the_actor_alone():
    actor, judge = policy(), critic()
    before = [parameter.clone() for parameter in actor.model.parameters()]
    recipes.ppo_update(actor, judge, episodes(6), Ppo(episodes_per_step=8), seed=0, train_actor=False)
    assert actor.step == 0 and judge.step == 2
    assert all(torch.equal(new, old) for new, old in zip(actor.model.parameters(), before, strict=True))


def test_an_estimator_that_needs_a_critic_says_so_where_there_is_none():
    with pytest.raises(ValueError, match="advantage=gae needs"):
        recipes.ppo_update(policy(), None, episodes(4), Ppo(episodes_per_step=4), seed=0)


def test_rates_of_speed_follow_the_verdicts_whatever_form_the_reward_has():
    data = [random_episode(seed, reward) for seed, reward in enumerate([-1.0, 1.0, 2.0, 3.0])]
    data[0].verdict = {"status": "wrong", "reward": -1}
    assert recipes.episode_metrics(data)["reward"] == 1.25
    for episode, reward in zip(data, [-1.0, 2.5, 1.8, 2.9], strict=True):
        episode.reward = reward
    metrics = recipes.episode_metrics(data)
    assert metrics["reward"] == pytest.approx(1.55) and metrics["pass_rate"] == 0.75
    assert metrics["faster_than_eager"] == 0.5 and metrics["faster_than_compile"] == 0.25


@pytest.mark.parametrize("gae_lambda", [1.0, 0.95])
def test_value_pretraining_explains_rewards_that_the_prompt_gives_away(gae_lambda):
    judge = critic()
    data = episodes(40)
    for episode in data:
        episode.ids[0] %= 2
        episode.reward = 3.0 if episode.ids[0] else -1.0
    assert recipes.value_quality(judge, data)["explained_variance"] < 0
    settings = CriticConfig(lr=1e-2, tokens_per_step=512, gae_lambda=gae_lambda)
    for epoch in range(12):
        recipes.value_epoch(judge, data, settings, seed=0, epoch=epoch)
    assert recipes.value_quality(judge, data)["explained_variance"] > 0.5


def memorise(trainer: Trainer, stop: int | None = None, **options) -> list[float]:
    draw = torch.Generator().manual_seed(0)
    data = [tokens_of(torch.randint(VOCAB, (20,), generator=draw).tolist(), [0] * 4 + [1] * 16) for _ in range(20)]
    options = {"epochs": 4} | options
    losses = []
    for metrics in recipes.sft(trainer, data, tokens_per_step=100, lr=1e-2, seed=3, **options):
        losses.append(metrics["loss"])
        if stop is not None and trainer.step == stop:
            break
    return losses


def test_imitation_lowers_the_loss_and_the_same_seed_gives_the_same_losses():
    first, second = memorise(policy()), memorise(policy())
    assert first == second
    assert len(first) == 16 and first[-1] < first[0] - 0.2


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_trainer_repeats_the_uninterrupted_run_exactly(tmp_path, optimizer):
    whole = memorise(policy(optimizer=optimizer))
    cut = policy(optimizer=optimizer)
    begun = memorise(cut, stop=7)
    cut.save(tmp_path)
    resumed = policy(optimizer=optimizer)
    resumed.load(tmp_path)
    assert resumed.step == 7
    assert begun + memorise(resumed) == whole


def test_ppo_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path):
    def run(actor, judge, seeds):
        return [
            recipes.ppo_update(actor, judge, episodes(8), Ppo(episodes_per_step=8), seed=seed)[name]
            for seed in seeds
            for name in ("loss", "critic_loss", "kl")
        ]

    whole = run(policy(), critic(), (0, 1, 2))
    actor, judge = policy(), critic()
    begun = run(actor, judge, (0,))
    for trainer, name in ((actor, "actor"), (judge, "critic")):
        (tmp_path / name).mkdir()
        trainer.save(tmp_path / name)
    again_actor, again_judge = policy(), critic()
    again_actor.load(tmp_path / "actor")
    again_judge.load(tmp_path / "critic")
    assert begun + run(again_actor, again_judge, (1, 2)) == whole


@pytest.mark.parametrize("damage", ["cut", "lose", "without_step"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path, damage):
    saved = policy()
    memorise(saved, stop=2)
    saved.save(tmp_path)
    path = tmp_path / "state.safetensors"
    content = path.read_bytes()
    if damage == "lose":
        path.unlink()
    elif damage == "without_step":
        save_file({name: value for name, value in load_file(path).items() if name != "step"}, path)
    else:
        path.write_bytes(content[: len(content) // 2])
    fresh = policy()
    before = [parameter.clone() for parameter in fresh.model.parameters()]
    with pytest.raises(CorruptCheckpoint):
        fresh.load(tmp_path)
    assert fresh.step == 0
    assert all(torch.equal(new, old) for new, old in zip(fresh.model.parameters(), before, strict=True))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    policy().save(tmp_path)
    with pytest.raises(CorruptCheckpoint):
        Trainer(tiny_policy(layers=1), row_tokens=256).load(tmp_path)


def test_a_gradient_that_is_not_finite_is_not_followed():
    actor = policy()
    before = [parameter.clone() for parameter in actor.model.parameters()]
    batch = batch_of([tokens_of([1, 2, 3], [0, 1, 1])])

    def broken(row):
        return actor.logprobs(row)[0].sum() * float("nan"), {}

    assert actor.update(batch, None, 1e-2, broken)["skipped"] == 1
    assert all(torch.equal(new, old) for new, old in zip(actor.model.parameters(), before, strict=True))


def test_a_critic_comes_back_from_its_folder(tmp_path):
    tiny_policy().save_pretrained(tmp_path / "policy")
    model = critic_from_policy(tmp_path / "policy", 1.5)
    judge = Trainer(model, row_tokens=256)
    batch = batch_of(tokens_of_episode(random_episode(seed)) for seed in range(4))
    assert torch.allclose(judge.flat(batch, judge.values), torch.tensor(1.5))
    recipes.value_epoch(judge, episodes(10), CriticConfig(lr=1e-2, tokens_per_step=256), seed=0, epoch=0)
    save_critic(model, tmp_path / "critic")
    loaded = Trainer(load_critic(tmp_path / "critic"), row_tokens=256)
    assert torch.equal(judge.flat(batch, judge.values), loaded.flat(batch, loaded.values))
    with pytest.raises(ValueError, match="is no critic"):
        load_critic(tmp_path / "policy")


def test_training_leaves_the_models_attention_as_it_was_and_goes_on_under_a_lease(tmp_path):
    actor = policy(lease=Lease(tmp_path))
    usual = actor.model.config._attn_implementation
    memorise(actor, stop=1)
    assert actor.model.config._attn_implementation == usual
    assert actor.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False).shape == (1, 6)


def test_bfloat16_is_near_float32_and_its_master_weights_stay_float32():
    batch = batch_of(tokens_of_episode(random_episode(seed)) for seed in range(4))
    exact, short = policy(), policy(precision="bf16")
    a, b = (trainer.flat(batch, lambda row, t=trainer: t.logprobs(row)[0]) for trainer in (exact, short))
    assert 0 < (a - b).abs().max() < 0.1
    recipes.sft_step(short, batch, 1e-3)
    assert all(parameter.dtype == torch.float32 for parameter in short.model.parameters())


def test_a_model_with_a_sliding_window_is_trained_through_its_own_masks():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=6,
        )
    )
    actor = Trainer(model, row_tokens=256)
    sequences = [tokens_of_episode(random_episode(seed)) for seed in range(3)]
    flat = actor.flat(batch_of(sequences), lambda row: actor.logprobs(row)[0])
    apart = [actor.flat(batch_of([sequence]), lambda row: actor.logprobs(row)[0]) for sequence in sequences]
    assert not actor._packed
    assert torch.allclose(flat, torch.cat(apart), atol=1e-5)


def test_a_model_that_caps_its_logits_is_refused():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            final_logit_softcapping=0.05,
        )
    )
    with pytest.raises(ValueError, match="more to its logits"):
        Trainer(model, row_tokens=256)


def test_time_ends_imitation_as_steps_do():
    trainer = policy()
    trainer.seconds = 10.0
    assert memorise(trainer, max_seconds=5.0) == []
    assert len(memorise(policy(), epochs=None, steps=3)) == 3


def test_activations_computed_twice_give_the_same_steps():
    kept, twice = memorise(policy(), stop=4), memorise(policy(gradient_checkpointing=True), stop=4)
    assert twice == pytest.approx(kept, abs=1e-6)


@pytest.fixture
def graphs(monkeypatch) -> list[int]:
    """The limits of recompilations under which layers were compiled: one for each graph.  Generates no code."""
    from torch._dynamo.backends.debugging import aot_eager

    torch._dynamo.reset()
    limits: list[int] = []

    def compiler(*arguments, **options):
        limits.append(torch._dynamo.config.recompile_limit)
        return aot_eager(*arguments, **options)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    return limits


@pytest.mark.nightly
@pytest.mark.parametrize("twice", [False, True])
def test_layers_are_compiled_in_steps_only_and_in_any_thread_with_room_for_those_beside_them(graphs, twice):
    """Above the limit, which a policy, a critic and an engine's check reach together, torch computes eagerly."""
    trainer = policy(compile=True, gradient_checkpointing=twice)
    assert not graphs
    thread = threading.Thread(target=lambda: memorise(trainer, stop=1))
    thread.start()
    thread.join()
    assert graphs and min(graphs) > 32


def test_a_time_limit_does_not_count_the_steps_that_compile(graphs, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(recipes, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    compiling = counted = 0
    trainer = policy(compile=True)
    data = [tokens_of(torch.randint(VOCAB, (20,)).tolist(), [0] + [1] * 19) for _ in range(20)]
    for _ in recipes.sft(trainer, data, tokens_per_step=40, lr=1e-2, seed=0, epochs=1):
        compiling, counted = compiling + (len(graphs) > counted), len(graphs)
    assert 0 < compiling < 10 and trainer.seconds == 10 - compiling


@pytest.mark.nightly
def test_compiled_layers_give_the_same_steps_and_are_compiled_a_few_times_for_all_lengths():
    from torch._dynamo.utils import counters

    batches = [
        batch_of([tokens_of(torch.randint(VOCAB, (n + 1,)).tolist(), [0] + [1] * n) for n in lengths])
        for lengths in ([5, 130, 64], [57, 40, 100, 3], [70, 80], [9] * 12, [200])
    ]
    plain, compiled = policy(), policy(compile=True)
    for index, batch in enumerate(batches):
        wanted, ours = (recipes.sft_step(trainer, batch, 1e-3) for trainer in (plain, compiled))
        assert ours == pytest.approx(wanted, rel=1e-3)
        if index == 1:
            made = counters["stats"]["unique_graphs"]
    assert made == counters["stats"]["unique_graphs"] > 0


@pytest.fixture
def unregistered(monkeypatch) -> None:
    """As in a process that has made no trainer: transformers does not know packed attention."""
    monkeypatch.delitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, attention.NAME, raising=False)


@pytest.mark.nightly
def test_compiled_layers_whose_activations_are_computed_twice_give_the_same_steps(graphs, unregistered, monkeypatch):
    calls = []

    def counted(*arguments, **options):
        calls.append(1)
        return packed(*arguments, **options)

    packed = attention._packed_attention
    monkeypatch.setattr(attention, "_packed_attention", counted)
    steps = []
    for compile in (False, True):
        trainer = policy(compile=compile, gradient_checkpointing=True)
        calls.clear()
        steps.append((memorise(trainer, stop=4), len(calls)))
    (plain, wanted), (ours, called) = steps
    assert ours == pytest.approx(plain, abs=1e-5) and called == wanted and graphs


@pytest.mark.gpu
def test_the_lease_is_free_once_the_device_has_done_the_backward_pass(tmp_path):
    actor = policy(device="cuda", lease=Lease(tmp_path))
    done = torch.cuda.Event()
    with actor.working():
        torch.cuda._sleep(2_000_000_000)
        done.record()
    with Lease(tmp_path).timing():
        assert done.query()


def test_attention_stays_out_of_compiled_layers_when_another_trainer_does_not_compile(unregistered):
    policy()
    assert not getattr(ALL_ATTENTION_FUNCTIONS[attention.NAME], "_torchdynamo_disable", False)
    policy(compile=True)
    policy()
    assert ALL_ATTENTION_FUNCTIONS[attention.NAME]._torchdynamo_disable


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_long_row_on_a_gpu_needs_no_tokens_squared(precision):
    """32,768 tokens, whose squared attention would take 17 GB in single precision; keys are shared between heads."""
    actor = policy(device="cuda", precision=precision, gradient_checkpointing=True)
    actor.row_tokens = 32_768
    actor.model.config.max_position_embeddings = actor.row_tokens
    ids = torch.randint(VOCAB, (actor.row_tokens,)).tolist()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    recipes.sft_step(actor, batch_of([tokens_of(ids, [0] + [1] * (len(ids) - 1))]), 1e-3)
    assert torch.cuda.max_memory_allocated() - before < 2**30


@pytest.mark.gpu
@pytest.mark.parametrize(("compile", "twice"), [(False, False), (True, False), (True, True)])
def test_a_row_of_many_sequences_on_a_gpu_in_half_precision_learns_what_a_cpu_does(compile, twice):
    lengths = [5, 130, 64, 1, 257, 40]
    batch = batch_of([tokens_of(torch.randint(VOCAB, (n + 1,)).tolist(), [0] + [1] * n) for n in lengths])
    gpu = policy(device="cuda", precision="bf16", compile=compile, gradient_checkpointing=twice)
    cpu = policy()
    gpu.row_tokens = cpu.row_tokens = 300
    for _ in range(3):
        ours, wanted = (recipes.sft_step(trainer, batch, 1e-2) for trainer in (gpu, cpu))
        assert ours["loss"] == pytest.approx(wanted["loss"], rel=0.02)
        assert ours["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.1)
