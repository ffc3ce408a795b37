"""Stages by themselves: what they draw, keep, refuse and hand on."""

import asyncio
import json
import socket
from pathlib import Path

import pytest
import torch

from cuda_agent.agent.loop import seed_of
from cuda_agent.compose import restricted
from cuda_agent.config import Config
from cuda_agent.context import StageContext
from cuda_agent.errors import BadConfiguration, NotGoodEnough, PolicyError, TryAgain
from cuda_agent.pipeline.checkpoints import StageCheckpoints
from cuda_agent.pipeline.graph import STAGES
from cuda_agent.policy.chat import Chat
from cuda_agent.policy.episode import Episode, write_episodes
from cuda_agent.policy.lora import ADAPTER
from cuda_agent.policy.model import load_model, load_policy, new_policy, save_policy, train_tokenizer
from cuda_agent.rl import trainers
from cuda_agent.rl.rollouts import draw, episode_settings, open_rollouts
from cuda_agent.rl.scores import read_scores
from cuda_agent.sandbox.wire import Verdict
from cuda_agent.stages import bootstrap, critic, evaluate, rft
from cuda_agent.storage import open_store
from cuda_agent.synthesis.teacher.optimum import Optimum, write_optima
from cuda_agent.tasks.task import Task
from cuda_agent.tracking import FileTracker, read_metrics
from cuda_agent.training.critic import critic_from_policy, load_critic
from cuda_agent.training.ranks import Ranks
from tests.policy.adapters import merge_adapter

POLICY = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 32, "vocab": 320}


def config(**sections) -> Config:
    return Config.model_validate({"policy": POLICY} | sections)


def context(folder: Path, name: str, settings: Config, inputs: dict[str, Path], *outputs: str) -> StageContext:
    for part in (*outputs, "scratch", "work", "cache"):
        (folder / part).mkdir(parents=True)
    tracker = FileTracker(folder / "said")
    store = open_store(str(folder / "store"))
    return StageContext(
        name=name,
        config=settings,
        inputs=inputs,
        outputs={output: folder / output for output in outputs},
        work=folder / "work",
        tracker=tracker,
        checkpoints=StageCheckpoints(store, name, "key", folder / "scratch", tracker),
        should_stop=lambda: False,
        cache=folder / "cache",
    )


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = train_tokenizer(["relu exp sum of x"] * 8, POLICY["vocab"])
    save_policy(new_policy(config().policy, tokenizer, 0), tokenizer, folder)
    return folder


def played(chat: Chat, task: str, sample: int, reward: float | None, flags: tuple[str, ...] = ()) -> Episode:
    prompt = chat.prompt_ids([{"role": "user", "content": task}])
    answer = chat.turn_ids({"role": "assistant", "content": f"sum of {task} {reward}"})
    sampled = [0] * len(prompt) + [1] * len(answer)
    return Episode(
        id=f"test/{task}/{sample}",
        task=task,
        kind="agent",
        ids=prompt + answer,
        mask=sampled,
        logprobs=[-1.0 * one for one in sampled],
        versions=[one - 1 for one in sampled],
        turns=[0] * len(sampled),
        reward=reward,
        ended="answer" if reward is not None else "infra",
        flags=list(flags),
        verdict=None
        if reward is None
        else {"status": "ok", "reward": reward, "speedup_eager": 10.0, "speedup_compile": 10.0 * reward},
    )


def collected(folder: Path, policy: Path, rewards) -> Path:
    chat = Chat(load_policy(policy)[1], "compact")
    folder.mkdir()
    write_episodes(folder / "episodes.jsonl", [played(chat, *one) for one in rewards])
    return folder


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_every_task_is_drawn_equally_often_whatever_the_batch():
    tasks = [Task(f"t{n}", "", (), "torch#1") for n in range(5)]
    drawn = [task.name for step in range(10) for task in draw(tasks, 3, 7, step)]
    assert {drawn.count(task.name) for task in tasks} == {6}
    assert draw(tasks, 3, 7, 4) == draw(tasks, 3, 7, 4) != draw(tasks, 3, 8, 4)


def test_seeds_depend_on_the_runs_seed_and_the_name():
    assert len({seed_of(seed, name) for seed in (0, 1) for name in ("a", "b")}) == 4
    assert 0 <= seed_of(0, "a") < 2**63


def test_values_are_held_out_by_episode():
    chat_free = [
        Episode(f"{t}/{s}", t, "agent", [1], [0], [0.0], [-1], [0], 1.0, "answer") for t in "abcde" for s in "xy"
    ]
    training, heldout = critic.hold_out(chat_free, 0.4, 0)
    assert {e.id for e in training}.isdisjoint(e.id for e in heldout)
    assert len(heldout) == 4 and len(training) + len(heldout) == 10
    assert critic.hold_out(chat_free[::-1], 0.4, 0) == (training, heldout), "the order of the episodes does not matter"
    assert critic.hold_out(chat_free[:1], 0.4, 0) == (chat_free[:1], chat_free[:1])


@pytest.mark.parametrize("processes", [1, 2], ids=["one process", "ranks, of which bootstrap starts none"])
def test_bootstrap_on_a_machine_without_a_gpu_is_a_wrong_configuration(tmp_path, monkeypatch, processes):
    monkeypatch.setattr(trainers, "gpus", lambda: 0)
    settings = config(training={"device": "cuda", "num_processes": processes})
    ctx = context(tmp_path / "stage", "bootstrap", settings, {}, "policy")
    with pytest.raises(BadConfiguration, match=r"training\.device is cuda: expected at least 1 GPU"):
        bootstrap.run(ctx)


def test_a_base_without_a_tokenizer_is_a_wrong_configuration(tmp_path, policy):
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "model.safetensors"):
        (base / name).write_bytes((policy / name).read_bytes())
    ctx = context(tmp_path / "stage", "bootstrap", config(policy=POLICY | {"base": str(base)}), {}, "policy")
    with pytest.raises(BadConfiguration, match="no tokenizer"):
        bootstrap.run(ctx)


def test_a_context_longer_than_the_bases_positions_is_a_wrong_configuration(tmp_path, policy):
    """Else the engine of a later stage would fail at the first long conversation."""
    longest = load_model(policy).config.max_position_embeddings
    settings = config(policy={"base": str(policy), "context": longest + 1})
    with pytest.raises(BadConfiguration, match=f"policy.context: policy.base has {longest} positions"):
        bootstrap.run(context(tmp_path, "bootstrap", settings, {}, "policy"))


def test_a_base_that_is_whole_is_handed_on(tmp_path, policy):
    ctx = context(tmp_path / "stage", "bootstrap", config(policy=POLICY | {"base": str(policy)}), {}, "policy")
    bootstrap.run(ctx)
    model, tokenizer = load_policy(ctx.outputs["policy"])
    assert model.config.hidden_size == POLICY["hidden"] and tokenizer.chat_template


def test_a_stage_whose_engines_are_gone_is_tried_again(tmp_path, policy):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        served = POLICY | {"engine": "vllm", "vllm": {"servers": [address]}}
        settings = config(policy=served, sandbox={"clock": "model"})
        ctx = context(tmp_path / "stage", "collect", settings, {"policy": policy})

        async def script():
            async with open_rollouts(ctx, policy, episode_settings(settings, turns=1, context=64, temperature=1.0)):
                pass

        with pytest.raises(TryAgain, match="does not answer"):
            asyncio.run(script())


def test_rejection_keeps_what_was_rewarded_and_shows_no_bad_pattern(tmp_path, policy):
    rewards = [("x", 0, 3.0), ("x", 1, -1.0), ("y", 0, 1.0, ("loop",)), ("y", 1, None), ("y", 2, 2.0)]
    episodes = collected(tmp_path / "episodes", policy, rewards)
    ctx = context(tmp_path / "stage", "rft", config(), {"episodes": episodes, "policy": policy}, "policy")
    rft.run(ctx)
    assert ctx.tracker.notes() == ["rft imitates 2 of 5 episodes"]
    assert weights(ctx.outputs["policy"]) != weights(policy)


def test_rejection_can_keep_the_fastest_answers_of_each_task(tmp_path, policy):
    seconds = {"x": (3e-5, None, 1e-5, 2e-5), "y": (4e-5,), "z": (None, None, None)}
    episodes = []
    for task, times in seconds.items():
        for sample, time in enumerate(times):
            episode = played(Chat(load_policy(policy)[1], "compact"), task, sample, 1.0)
            episode.verdict = {"seconds": time}
            episodes.append(episode)
    kept = [(episode.task, episode.id.rpartition("/")[2]) for episode in rft.fastest(episodes, 2)]
    assert kept == [("x", "2"), ("x", "3"), ("y", "0"), ("z", "0"), ("z", "1")]


def test_a_turn_that_was_cut_off_is_not_imitated_and_the_turns_before_it_are(tmp_path, policy, monkeypatch):
    chat = Chat(load_policy(policy)[1], "compact")
    whole, cut, two = (played(chat, task, 0, 1.0) for task in "xyz")
    del cut.ids[-1], cut.mask[-1], cut.logprobs[-1], cut.versions[-1], cut.turns[-1]
    answer = cut.ids[-sum(cut.mask) :]
    before, length = list(two.mask), len(answer)
    for name, more in (("ids", [7, *answer]), ("mask", [0] + [1] * length), ("logprobs", [0.0] * (length + 1))):
        getattr(two, name).extend(more)
    two.versions += [0] * (length + 1)
    two.turns += [1] * (length + 1)
    (tmp_path / "episodes").mkdir()
    write_episodes(tmp_path / "episodes" / "episodes.jsonl", [whole, cut, two])
    inputs = {"episodes": tmp_path / "episodes", "policy": policy}
    ctx = context(tmp_path / "stage", "rft", config(), inputs, "policy")
    seen = []
    monkeypatch.setattr(rft, "imitate", lambda ctx, trainer, sequences, *_, **__: seen.extend(sequences))
    rft.run(ctx)
    assert [sequence.mask.int().tolist() for sequence in seen] == [whole.mask, before + [0] * (length + 1)]
    assert [len(sequence.logprobs) for sequence in seen] == [sum(whole.mask), sum(before)]
    assert ctx.tracker.notes() == ["rft imitates 2 of 3 episodes"]


def test_without_anything_to_imitate_the_policy_is_passed_on(tmp_path, policy):
    episodes = collected(tmp_path / "episodes", policy, [("x", 0, -1.0), ("y", 0, None)])
    ctx = context(tmp_path / "stage", "rft", config(), {"episodes": episodes, "policy": policy}, "policy")
    rft.run(ctx)
    assert weights(ctx.outputs["policy"]) == weights(policy)


def test_the_critics_gate_warns_or_stops(tmp_path, policy):
    rewards = [(task, sample, float(sample % 2)) for task in ("x", "y", "z") for sample in range(3)]
    episodes = collected(tmp_path / "episodes", policy, rewards)
    inputs = {"episodes": episodes, "policy": policy}
    strict = {"epochs": 1, "min_explained_variance": 0.999, "heldout": 0.5}
    warned = context(tmp_path / "warn", "critic", config(critic=strict), inputs, "critic")
    critic.run(warned)
    assert "below 0.999" in warned.tracker.notes()[0] and (warned.outputs["critic"] / "config.json").exists()
    assert "heldout_explained_variance" in read_metrics(tmp_path / "warn" / "said" / "metrics.jsonl")[0]
    stopped = context(tmp_path / "stop", "critic", config(critic=strict | {"gate": "stop"}), inputs, "critic")
    with pytest.raises(NotGoodEnough, match=r"critic\.min_explained_variance"):
        critic.run(stopped)


def test_the_critics_gate_does_not_judge_rewards_that_are_all_the_same(tmp_path, policy):
    """The explained variance is then 0, however good the critic is."""
    episodes = collected(tmp_path / "episodes", policy, [(name, 0, 3.0) for name in "uvwxyz"])
    settings = config(critic={"epochs": 1, "gate": "stop"})
    ctx = context(tmp_path / "stage", "critic", settings, {"episodes": episodes, "policy": policy}, "critic")
    critic.run(ctx)
    assert "the same reward" in ctx.tracker.notes()[0] and (ctx.outputs["critic"] / "config.json").exists()


@pytest.mark.parametrize(("form", "reward"), [("ladder", 3.0), ("raw", 10.0), ("speedup", 30 / 11)])
def test_the_critic_learns_the_reward_that_agentic_goes_on_with(tmp_path, policy, monkeypatch, form, reward):
    learned: list[Episode] = []
    monkeypatch.setattr(critic, "value_epoch", lambda trainer, episodes, *_, **__: learned.extend(episodes) or {})
    episodes = collected(tmp_path / "episodes", policy, [*((name, 0, 3.0) for name in "xyz"), ("lost", 0, None)])
    settings = config(critic={"epochs": 1}, agentic={"reward": form})
    (row,) = (stage for stage in STAGES if stage.name == "critic")
    inputs = {"episodes": episodes, "policy": policy}
    critic.run(context(tmp_path / "stage", "critic", restricted(settings, row.config), inputs, "critic"))
    assert [episode.reward for episode in learned] == pytest.approx([reward] * 2)


def test_adapters_are_trained_and_the_policy_that_is_given_on_is_whole(tmp_path, policy):
    episodes = collected(tmp_path / "episodes", policy, [(f"t{n}", 0, 3.0) for n in range(6)])
    settings = config(rft={"epochs": 2, "tokens_per_step": 24}, lora={"rank": 2, "targets": ["q_proj", "down_proj"]})
    ctx = context(tmp_path / "stage", "rft", settings, {"episodes": episodes, "policy": policy}, "policy")
    rft.run(ctx)
    before, after = load_model(policy), load_model(ctx.outputs["policy"])
    changed = [
        n for (n, old), new in zip(before.named_parameters(), after.parameters(), strict=True) if (old != new).any()
    ]
    assert {name.rsplit(".", 2)[-2] for name in changed} == {"q_proj", "down_proj"}
    merge_adapter(before, ctx.outputs["policy"] / ADAPTER)
    for ours, merged in zip(after.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(ours, merged, rtol=0, atol=1e-6)
    wrong = config(lora={"rank": 2, "targets": ["qkv"]})
    with pytest.raises(PolicyError, match="no linear layers called qkv"):
        rft.run(context(tmp_path / "wrong", "rft", wrong, {"episodes": episodes, "policy": policy}, "policy"))


def test_a_critic_of_adapters_is_a_whole_critic(tmp_path, policy):
    rewards = [(task, sample, float(sample % 2)) for task in ("x", "y", "z") for sample in range(3)]
    episodes = collected(tmp_path / "episodes", policy, rewards)
    settings = config(critic={"epochs": 1}, lora={"rank": 2})
    ctx = context(tmp_path / "stage", "critic", settings, {"episodes": episodes, "policy": policy}, "critic")
    critic.run(ctx)
    plain = critic_from_policy(policy)
    assert [name for name, _ in load_critic(ctx.outputs["critic"]).named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]


def test_a_critic_without_any_reward_to_learn_from_stops(tmp_path, policy):
    episodes = collected(tmp_path / "episodes", policy, [("x", 0, None)])
    ctx = context(tmp_path / "stage", "critic", config(), {"episodes": episodes, "policy": policy}, "critic")
    with pytest.raises(NotGoodEnough, match="no collected episode has a reward"):
        critic.run(ctx)


def test_supervised_training_goes_on_from_its_checkpoint_to_the_same_weights(tmp_path, policy):
    episodes = collected(tmp_path / "episodes", policy, [(f"t{n}", 0, 3.0) for n in range(6)])
    settings = config(rft={"epochs": 2, "tokens_per_step": 24})
    inputs = {"episodes": episodes, "policy": policy}
    whole = context(tmp_path / "whole", "rft", settings, inputs, "policy")
    rft.run(whole)
    cut = context(tmp_path / "cut", "rft", settings, inputs, "policy")
    asked = iter([False, False, True])
    cut.should_stop = lambda: next(asked, True)
    with pytest.raises(Exception, match="stopped after step"):
        rft.run(cut)
    cut.should_stop = lambda: False
    rft.run(cut)
    assert weights(cut.outputs["policy"]) == weights(whole.outputs["policy"])
    logged = [read_metrics(tmp_path / name / "said" / "metrics.jsonl") for name in ("whole", "cut")]
    assert list(logged[0]) == list(logged[1])
    assert json.loads((cut.outputs["policy"] / "config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.nightly
def test_a_stage_goes_on_over_ranks_to_the_same_policy_and_is_tried_again_when_one_dies(tmp_path, policy, monkeypatch):
    episodes = collected(tmp_path / "episodes", policy, [(f"t{n}", 0, 3.0) for n in range(6)])
    inputs = {"episodes": episodes, "policy": policy}
    once = config(rft={"epochs": 2, "tokens_per_step": 24})
    shared = config(rft={"epochs": 2, "tokens_per_step": 24}, training={"num_processes": 2})
    whole = context(tmp_path / "whole", "rft", once, inputs, "policy")
    rft.run(whole)
    cut = context(tmp_path / "cut", "rft", once, inputs, "policy")
    asked = iter([False, False, True])
    cut.should_stop = lambda: next(asked, True)
    with pytest.raises(TryAgain, match="stopped after step"):
        rft.run(cut)
    cut.config, cut.should_stop = shared, lambda: False
    place, dying = Ranks.place, iter([True])

    def place_and_die(ranks, *arguments):
        place(ranks, *arguments)
        if next(dying, False):
            ranks.processes[1].kill()

    monkeypatch.setattr(Ranks, "place", place_and_die)
    with pytest.raises(TryAgain, match="rank 1 of the trainer"):
        rft.run(cut)
    rft.run(cut)
    ours, theirs = (load_model(ctx.outputs["policy"]).parameters() for ctx in (whole, cut))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_more_gpus_than_there_are_is_a_wrong_configuration(tmp_path, policy):
    episodes = collected(tmp_path / "episodes", policy, [("t", 0, 3.0)])
    settings = config(training={"num_processes": 64, "device": "cuda"})
    ctx = context(tmp_path / "stage", "rft", settings, {"episodes": episodes, "policy": policy}, "policy")
    with pytest.raises(BadConfiguration, match="at least 64 GPUs"):
        rft.run(ctx)


def test_an_evaluation_says_how_far_a_policy_is_from_the_best_known_designs(tmp_path, policy, monkeypatch):
    tasks = [Task("t0", "", (), "torch#1"), Task("t1", "", (), "torch#1")]
    verdict = Verdict("ok", "plan", "quick", "cuda", "real", seconds=1.0, eager_seconds=2.0, compile_seconds=3.0)
    episodes = [played(Chat(load_policy(policy)[1], "compact"), task.name, 0, 1.0) for task in tasks]
    for episode in episodes:
        episode.verdict = verdict.to_json()

    async def play(*_, **__):
        return tasks, episodes

    monkeypatch.setattr(evaluate, "play_rounds", play)
    (tmp_path / "tasks").mkdir()
    for name, known in (("without", {}), ("with", {"t1": Optimum("", 4.0, 12.0)})):
        write_optima(tmp_path / "tasks", known)
        evaluate.run(context(tmp_path / name, "evaluate-base", config(), {"tasks": tmp_path / "tasks"}, "scores"))
        found = read_scores(tmp_path / name / "scores" / "scores.json")
        assert [outcome.final.gap for outcome in found.outcomes] == [None, 1.5 if known else None]
        assert found.final.overall.gap == (pytest.approx(1.5) if known else None)
