"""Ranks against one process: the same losses and weights, checkpoints that fit any number of them, and their death."""

import itertools
import threading
import time

import pytest
import torch
from training_cases import VOCAB, random_episode, tiny_policy

from cuda_agent.config import CriticConfig, Ppo
from cuda_agent.lease import Lease
from cuda_agent.policy.lora import attach
from cuda_agent.training import recipes
from cuda_agent.training.attention import part_of
from cuda_agent.training.checkpoint import CorruptCheckpoint
from cuda_agent.training.critic import Critic
from cuda_agent.training.distributed import DistributedTrainer, TrainerLost
from cuda_agent.training.packing import batch_of, tokens_of, tokens_of_episode
from cuda_agent.training.ranks import Ranks
from cuda_agent.training.sharding import rows_of_rank
from cuda_agent.training.trainer import Trainer

TOKENS = 64  # of a row: several rows a step
NAMES = (f"trainer-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Ranks that the tests share, by their number; started when they are first asked for."""
    started: dict[int, Ranks] = {}

    def group(count: int) -> Ranks:
        if count not in started:
            started[count] = Ranks(count, lease=tmp_path_factory.getbasetemp() / "lease")
        return started[count]

    yield group
    for ranks in started.values():
        ranks.close()


def critic_model() -> Critic:
    model = Critic(tiny_policy(1).model)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    return model


def trainer(group: Ranks | None, model, **options):
    options = {"row_tokens": TOKENS} | options
    if group is None:
        made = Trainer(model, **options)
        made.workers = 1
        return made
    return DistributedTrainer(group, next(NAMES), model, **options)


def episodes(count: int = 9):
    return [random_episode(seed) for seed in range(count)]


def memorise(learner, first: int = 0, last: int = 6) -> list[float]:
    draw = torch.Generator().manual_seed(0)
    data = [tokens_of(torch.randint(VOCAB, (20,), generator=draw).tolist(), [0] * 4 + [1] * 16) for _ in range(20)]
    losses = []
    for metrics in recipes.sft(learner, data, tokens_per_step=100, lr=1e-2, seed=3, epochs=4):
        losses.append(metrics["loss"])
        if learner.step == last:
            break
    assert learner.step == last and len(losses) == last - first
    return losses


def assert_same_weights(one, other):
    for ours, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def without_times(metrics):
    return {name: value for name, value in metrics.items() if "second" not in name}


@pytest.mark.nightly
@pytest.mark.parametrize("count", [1, 2])
def test_ppo_gives_the_metrics_and_weights_of_one_process(groups, count):
    results = []
    for group in (None, groups(count)):
        actor, judge = trainer(group, tiny_policy()), trainer(group, critic_model())
        settings = Ppo(episodes_per_step=8, behavior_logprobs="trainer")
        metrics = [without_times(recipes.ppo_update(actor, judge, episodes(), settings, seed=s)) for s in range(2)]
        results.append((metrics, actor, judge))
    (alone, actor, judge), (shared, ranked_actor, ranked_judge) = results
    for ours, theirs in zip(alone, shared, strict=True):
        assert theirs == pytest.approx(ours, abs=1e-5, rel=1e-5)
    assert ranked_actor.step == ranked_judge.step == 4
    assert_same_weights(actor, ranked_actor)
    assert_same_weights(judge, ranked_judge)


def test_without_a_critic_two_ranks_give_the_metrics_and_weights_of_one_process(groups):
    results = []
    for group in (None, groups(2)):
        actor = trainer(group, tiny_policy())
        settings = Ppo(episodes_per_step=8, advantage="rloo")
        results.append((without_times(recipes.ppo_update(actor, None, episodes(), settings, seed=0)), actor))
    (alone, actor), (shared, ranked_actor) = results
    assert shared == pytest.approx(alone, abs=1e-5, rel=1e-5)
    assert_same_weights(actor, ranked_actor)


@pytest.mark.parametrize("count", [1, 2])
def test_values_and_their_targets_are_those_of_one_process(groups, count):
    results = []
    for group in (None, groups(count)):
        judge = trainer(group, critic_model())
        settings = CriticConfig(lr=1e-2, tokens_per_step=128, gae_lambda=0.95)
        metrics = [recipes.value_epoch(judge, episodes(), settings, seed=0, epoch=epoch) for epoch in range(2)]
        results.append([*map(without_times, metrics), recipes.value_quality(judge, episodes())])
    for ours, theirs in zip(*results, strict=True):
        assert theirs == pytest.approx(ours, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("kind", ["adapters", "computed twice", "bfloat16", "own output layer"])
def test_two_ranks_imitate_as_one_process_does(groups, kind):
    def model():
        made = tiny_policy()
        if kind == "adapters":
            attach(made, 4, 8.0, ["q_proj", "v_proj", "down_proj"])
        if kind == "own output layer":
            made.config.tie_word_embeddings = False
            made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.detach().clone())
        return made

    options = {"gradient_checkpointing": kind == "computed twice"}
    options |= {"precision": "bf16"} if kind == "bfloat16" else {}
    alone, shared = (trainer(group, model(), **options) for group in (None, groups(2)))
    tolerance = 1e-2 if kind == "bfloat16" else 1e-5
    assert memorise(shared) == pytest.approx(memorise(alone), abs=tolerance)
    if kind != "bfloat16":
        assert_same_weights(alone, shared)


def test_a_rank_without_a_row_takes_part(groups):
    """One sequence, two ranks."""
    alone, shared = (trainer(group, tiny_policy()) for group in (None, groups(2)))
    batch = batch_of([tokens_of_episode(random_episode(3))])
    losses = [[recipes.sft_step(one, batch, 1e-2)["loss"] for _ in range(3)] for one in (alone, shared)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5) and losses[0][2] < losses[0][0]
    assert_same_weights(alone, shared)


def test_a_run_goes_on_with_other_numbers_of_ranks_as_if_it_had_not_been_cut(groups, tmp_path):
    whole = trainer(None, tiny_policy())
    expected, got = memorise(whole, 0, 12), []
    order = [groups(2), groups(1), None, groups(2)]
    for part, group in enumerate(order):
        learner = trainer(group, tiny_policy(part))  # whose weights are others before it loads
        if part:
            learner.load(tmp_path / str(part - 1))
        assert learner.step == 3 * part
        got += memorise(learner, 3 * part, 3 * part + 3)
        (tmp_path / str(part)).mkdir()
        learner.save(tmp_path / str(part))
    assert got == pytest.approx(expected, abs=1e-5)
    assert_same_weights(whole, learner)


@pytest.mark.parametrize("damage", ["cut", "lose"])
@pytest.mark.parametrize("file", ["__1_0.distcp", ".metadata"])
def test_a_damaged_checkpoint_is_refused_by_all_ranks_and_changes_nothing(groups, tmp_path, file, damage):
    saved = trainer(groups(2), tiny_policy())
    memorise(saved, 0, 1)
    saved.save(tmp_path)
    path = tmp_path / file
    content = path.read_bytes()
    if damage == "lose":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2])
    fresh = trainer(groups(2), tiny_policy())
    with pytest.raises(CorruptCheckpoint):
        fresh.load(tmp_path)
    assert_same_weights(fresh, trainer(None, tiny_policy()))


def test_a_checkpoint_of_another_model_is_refused(groups, tmp_path):
    trainer(groups(2), tiny_policy()).save(tmp_path)
    for group in (groups(2), None):
        with pytest.raises(CorruptCheckpoint, match="another model"):
            trainer(group, tiny_policy(layers=1)).load(tmp_path)


def test_a_mistake_is_raised_as_it_is_and_the_ranks_go_on(groups):
    shared = trainer(groups(2), tiny_policy())
    long = batch_of([tokens_of(list(range(40)) * 2, [0] + [1] * 79)])
    with pytest.raises(ValueError, match="80 tokens does not fit a row of 64"):
        recipes.sft_step(shared, long, 1e-2)
    assert recipes.sft_step(shared, batch_of([tokens_of([1, 2, 3], [0, 1, 1])]), 1e-2)["loss"] > 0


def test_muon_is_refused_for_shared_weights(groups):
    with pytest.raises(ValueError, match="take AdamW"):
        trainer(groups(2), tiny_policy(), optimizer="muon")


def test_a_stopwatch_gets_its_turn_between_the_steps_of_ranks(groups, tmp_path_factory):
    shared = trainer(groups(2), tiny_policy())
    done, timed = threading.Event(), []

    def watch():
        lease = Lease(tmp_path_factory.getbasetemp() / "lease")
        while not done.is_set():
            with lease.timing():
                timed.append(time.monotonic())
            time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        memorise(shared, 0, 6)
    finally:
        done.set()
        thread.join()
    assert len(timed) > 1


def test_ranks_outlive_a_sigterm_that_reaches_all_processes(groups):
    """As in a pod that is deleted; the stage writes its checkpoint first, with the ranks."""
    group = groups(2)
    shared, batch = trainer(group, tiny_policy()), batch_of([tokens_of([1, 2, 3], [0, 1, 1])])
    recipes.sft_step(shared, batch, 1e-2)
    for process in group.processes:
        process.terminate()
    assert recipes.sft_step(shared, batch, 1e-2)["loss"] > 0


def test_a_killed_rank_ends_the_step_with_trainer_lost():
    with Ranks(2) as ranks:
        learner = DistributedTrainer(ranks, "policy", tiny_policy(layers=8), row_tokens=TOKENS)
        threading.Timer(0.5, ranks.processes[1].kill).start()
        with pytest.raises(TrainerLost, match="rank 1"):
            while True:
                recipes.sft_step(learner, batch_of(tokens_of_episode(episode) for episode in episodes(40)), 1e-3)
        with pytest.raises(TrainerLost, match="closed"):
            recipes.sft_step(learner, batch_of([tokens_of([1, 2, 3], [0, 1, 1])]), 1e-3)
    assert all(process.exitcode is not None for process in ranks.processes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_are_dealt_so_that_like_ones_are_computed_together(ranks):
    batch = batch_of(tokens_of_episode(episode) for episode in episodes(30))
    rows = batch.rows(TOKENS)
    shares = [rows_of_rank(rows, ranks, rank) for rank in range(ranks)]
    assert len({len(parallelism) for parallelism in shares}) == 1, "every rank takes part in every round"
    seen = torch.cat([row.tokens for parallelism in shares for row in parallelism])
    assert sorted(seen.tolist()) == list(range(len(batch)))
    for turn in zip(*shares, strict=True):
        longest = max(len(row.ids) for row in turn if len(row.tokens))
        shorter = [len(row.ids) for parallelism in shares for row in parallelism[: len(turn)] if len(row.tokens)]
        assert longest <= max(shorter)
    lengths = [sum(len(row.ids) for row in parallelism) for parallelism in shares]
    assert max(lengths) - min(lengths) <= TOKENS


@pytest.mark.nightly
def test_chunks_of_logits_are_made_again_with_weights_that_are_gathered(groups):
    """A vocabulary so large that sixteen tokens fill a chunk."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def model():
        torch.manual_seed(0)
        size = {"vocab_size": 2**20, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        return Qwen3ForCausalLM(Qwen3Config(**size, **heads, tie_word_embeddings=True))

    ids = torch.randint(2**20, (2, 20), generator=torch.Generator().manual_seed(0)).tolist()
    batch = batch_of(tokens_of(one, [0] + [1] * 19) for one in ids)
    alone, shared = (trainer(group, model()) for group in (None, groups(2)))
    losses = [[recipes.sft_step(one, batch, 1e-2)["loss"] for _ in range(2)] for one in (alone, shared)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_parts_of_a_row_predict_each_of_its_tokens_once(ranks):
    batch = batch_of(tokens_of_episode(episode) for episode in episodes(5))
    for row in batch.rows(100):
        parts = [part_of(row, ranks, rank) for rank in range(ranks)]
        assert len({len(part.ids) for part in parts}) == 1
        assert all(sum(part.lengths) == ranks * len(part.ids) for part in parts)
        assert sorted(torch.cat([part.tokens for part in parts]).tolist()) == sorted(row.tokens.tolist())
        where = zip(row.tokens.tolist(), row.before.tolist(), strict=True)
        states = {token: (int(row.ids[at]), int(row.positions[at])) for token, at in where}
        for part in parts:
            for token, at in zip(part.tokens.tolist(), part.before.tolist(), strict=True):
                assert (int(part.ids[at]), int(part.positions[at])) == states[token]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "twice"])
def test_rows_that_are_cut_over_ranks_give_what_one_process_gives(groups, count, checkpointing):
    results = []
    for group, options in (
        (None, {}),
        (groups(count), {"parallelism": "context", "gradient_checkpointing": checkpointing}),
    ):
        options |= {"row_tokens": 150}
        actor, judge = trainer(group, tiny_policy(), **options), trainer(group, critic_model(), **options)
        metrics = [
            without_times(recipes.ppo_update(actor, judge, episodes(), Ppo(episodes_per_step=8), seed=s))
            for s in range(2)
        ]
        results.append((metrics, actor, judge))
    (alone, actor, judge), (shared, ranked_actor, ranked_judge) = results
    for ours, theirs in zip(alone, shared, strict=True):
        assert theirs == pytest.approx(ours, abs=1e-5, rel=1e-5)
    assert_same_weights(actor, ranked_actor)
    assert_same_weights(judge, ranked_judge)


@pytest.mark.gpu
@pytest.mark.parametrize("parallelism", ["data", "context"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_gpus_give_the_losses_of_one_process_and_go_on_from_each_other(tmp_path, precision, parallelism):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    options = {"precision": precision, "gradient_checkpointing": True}
    tolerance = 1e-4 if precision == "fp32" else 5e-2
    alone = trainer(None, tiny_policy(), device="cuda", **options)
    expected = memorise(alone, 0, 8)
    with Ranks(2, device="cuda") as ranks:
        shared = trainer(ranks, tiny_policy(), parallelism=parallelism, **options)
        assert memorise(shared, 0, 4) == pytest.approx(expected[:4], abs=tolerance)
        shared.save(tmp_path)
        again = trainer(ranks, tiny_policy(1), parallelism=parallelism, **options)
        again.load(tmp_path)
        assert memorise(again, 4, 8) == pytest.approx(expected[4:], abs=tolerance)
    single = trainer(None, tiny_policy(1), device="cuda", **options)
    single.load(tmp_path)
    assert memorise(single, 4, 8) == pytest.approx(expected[4:], abs=tolerance)
