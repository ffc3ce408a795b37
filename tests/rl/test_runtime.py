"""Actor and critic of a stage, and the actor alone."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cuda_agent.config import Config, Ppo
from cuda_agent.context import WorkerContext
from cuda_agent.lease import Lease
from cuda_agent.policy.engines.engine import SamplingParams
from cuda_agent.policy.engines.local import LocalEngine
from cuda_agent.policy.episode import Episode
from cuda_agent.policy.model import new_policy, train_tokenizer
from cuda_agent.rl.runtime import ActorCritic, LocalRuntime, settings_of
from cuda_agent.training.critic import Critic
from tests.waiting import AskedLease

POLICY = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 32, "vocab": 320, "threads": 1}


def learner(folder: Path, dtype: str = "float32", **ppo) -> ActorCritic:
    """With a critic where the advantage is gae."""
    small = {"episodes_per_step": 4, "samples_per_prompt": 2, "minibatches": 1}
    denominators = {"warmup": {"behavior_logprobs": "trainer"}}
    config = Config.model_validate({"policy": POLICY | {"dtype": dtype}, "agentic": small | ppo} | denominators)
    site = WorkerContext("agentic", config, {}, folder, folder)
    tokenizer = train_tokenizer(["relu exp sum"] * 8, 320)
    model, other = (new_policy(config.policy, tokenizer, seed) for seed in (0, 1))
    return ActorCritic(site, config.agentic, model, Critic(other.model) if config.agentic.advantage == "gae" else None)


def episodes(rewards) -> list[Episode]:
    """Two samples of each task."""
    made = []
    for n, reward in enumerate(rewards):
        ids, mask, zeros = list(range(n, n + 6)), [0, 0, 1, 1, 0, 1], [0] * 6
        made.append(Episode(f"s/{n // 2}/{n % 2}", "t", "agent", ids, mask, [-1.0] * 6, zeros, zeros, reward, "answer"))
    return made


def weights(one: ActorCritic) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in one.actor.model.parameters()])


@pytest.mark.parametrize("advantage", ["group", "rloo"])
def test_without_a_critic_the_actor_learns_is_saved_and_goes_on_alone(tmp_path, advantage):
    one = learner(tmp_path, advantage=advantage, critic_warmup=3)
    before = weights(one)
    metrics = one.update(0, episodes([3.0, -1.0, 1.0, 2.0]))
    assert not [name for name in metrics if name.startswith(("critic", "value", "explained"))]
    assert metrics["grad_norm"] > 0 and not torch.equal(weights(one), before), "no step is a critic's alone"
    (tmp_path / "checkpoint").mkdir()
    one.save(tmp_path / "checkpoint")
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["actor"]
    other = learner(tmp_path, advantage=advantage)
    other.load(tmp_path / "checkpoint")
    assert other.critic is None and other.actor.step == one.actor.step == 1
    for each in (one, other):
        each.update(1, episodes([1.0, 2.0, -1.0, 3.0]))
    assert torch.equal(weights(one), weights(other))


def test_groups_of_equal_rewards_leave_the_policy_alone(tmp_path):
    one = learner(tmp_path, advantage="group")
    before = weights(one)
    assert one.update(0, episodes([3.0, 3.0, -1.0, -1.0]))["grad_norm"] == 0
    assert torch.equal(weights(one), before)


def test_with_a_critic_both_are_saved_and_the_first_steps_are_the_critics(tmp_path):
    one = learner(tmp_path, critic_warmup=1)
    before = weights(one)
    metrics = one.update(0, episodes([3.0, -1.0, 1.0, 2.0]))
    assert torch.equal(weights(one), before) and metrics["critic_loss"] > 0
    one.update(1, episodes([3.0, -1.0, 1.0, 2.0]))
    assert not torch.equal(weights(one), before)
    (tmp_path / "checkpoint").mkdir()
    one.save(tmp_path / "checkpoint")
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["actor", "critic"]


def test_the_form_of_the_reward_is_part_of_what_episodes_are_played_with(tmp_path):
    site = WorkerContext("agentic", Config(), {}, tmp_path, tmp_path)
    assert [settings_of(site, Ppo(reward=form)).reward for form in ("ladder", "speedup")] == ["ladder", "speedup"]


def test_a_bfloat16_policy_learns_from_its_own_denominators_with_float32_weights(tmp_path):
    batch = episodes([3.0, -1.0, 1.0, 2.0])
    exact, short = (
        learner(tmp_path, dtype, minibatches=2, behavior_logprobs="trainer") for dtype in ("float32", "bfloat16")
    )
    wanted, got = (one.update(0, batch) for one in (exact, short))
    assert got["critic_loss"] != wanted["critic_loss"] == pytest.approx(got["critic_loss"], rel=0.05)
    assert got["train_inference_mismatch"] == pytest.approx(wanted["train_inference_mismatch"], rel=0.05)
    for trainer in (short.actor, short.critic):
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


def test_a_batch_says_how_long_the_engine_computed_and_how_long_it_waited_for_timings(tmp_path):
    one = learner(tmp_path, advantage="group")
    lease = AskedLease(tmp_path / "lease")
    engine = LocalEngine(one.actor.model, threads=1, batch=2, lease=lease)

    async def play(jobs, kind):
        lease.asked.clear()
        with Lease(tmp_path / "lease").timing():
            job = asyncio.ensure_future(engine.generate([1, 2, 3], SamplingParams(8, seed=0)))
            await asyncio.to_thread(lease.asked.wait)
            await asyncio.sleep(0.05)
        await job
        return []

    rollouts = SimpleNamespace(engine=engine, play=play)
    site = SimpleNamespace(name="agentic")
    runtime = LocalRuntime(site, Config().agentic, None, rollouts, one)
    first, second = (asyncio.run(runtime.play(step, [])) for step in (0, 1))
    for batch in (first, second):
        assert 0.03 < batch.metrics["engine_wait_seconds"] < batch.seconds
        assert 0 < batch.metrics["engine_seconds"] < batch.seconds
        assert batch.metrics["engine_steps"] > 0 and batch.metrics["engine_prompt_tokens"] > 0
    asyncio.run(engine.close())
