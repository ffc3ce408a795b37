"""Where trainers compute, and how."""

from pathlib import Path

import pytest

from cuda_agent.config import Config
from cuda_agent.context import WorkerContext
from cuda_agent.errors import BadConfiguration
from cuda_agent.policy.model import new_policy, train_tokenizer
from cuda_agent.rl import trainers
from cuda_agent.rl.trainers import make_trainer, shared_training
from cuda_agent.training import memory
from cuda_agent.training.critic import Critic
from cuda_agent.training.memory import layout, shape_of_policy

POLICY = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 32, "vocab": 320, "threads": 1}


def site(folder: Path, **sections) -> WorkerContext:
    policy = POLICY | sections.pop("policy", {})
    return WorkerContext("agentic", Config.model_validate({"policy": policy} | sections), {}, folder, folder)


def model_of(ctx: WorkerContext):
    return new_policy(ctx.config.policy, train_tokenizer(["relu exp sum"] * 8, 320), 0)


@pytest.fixture
def made(monkeypatch):
    """The options of the trainers that are made; nothing is computed, and this machine seems to have two GPUs."""
    options = []
    monkeypatch.setattr(trainers, "gpus", lambda: 2)
    monkeypatch.setattr(trainers, "Trainer", lambda model, **given: options.append(given))
    return options


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_process_trains_on_the_device_and_starts_no_rank(tmp_path, monkeypatch, made, device):
    monkeypatch.delattr(trainers, "Ranks")
    with shared_training(site(tmp_path, training={"device": device})) as ctx:
        assert ctx.ranks is None
        make_trainer(ctx, model_of(ctx), longest=64)
    assert [options["device"] for options in made] == [device] and made[0]["lease"] is not None


def test_several_processes_are_ranks_on_the_device(tmp_path, monkeypatch, made):
    started = []

    class Group:
        def __init__(self, count, **settings):
            started.append((count, settings["device"]))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def place(self, name, model, options):
            started.append(name)

    monkeypatch.setattr(trainers, "Ranks", Group)
    with shared_training(site(tmp_path, training={"device": "cuda", "num_processes": 2})) as ctx:
        make_trainer(ctx, model_of(ctx), longest=64)
    assert started == [(2, "cuda"), "policy"] and not made


@pytest.mark.parametrize("processes", [1, 3])
def test_a_missing_gpu_is_a_wrong_configuration(tmp_path, monkeypatch, processes):
    monkeypatch.setattr(trainers, "gpus", lambda: processes - 1)
    ctx = site(tmp_path, training={"device": "cuda", "num_processes": processes})
    with pytest.raises(BadConfiguration, match=f"at least {processes} GPUs, and this machine has {processes - 1}"):
        shared_training(ctx).__enter__()


BF16 = {"policy": {"dtype": "bfloat16"}, "warmup": {"minibatches": 1}, "agentic": {"behavior_logprobs": "trainer"}}


@pytest.mark.parametrize(("sections", "wanted"), [({}, "fp32"), (BF16, "bf16")], ids=["float32", "bfloat16"])
def test_ppo_and_critic_compute_in_the_policys_number_type_and_imitation_in_the_devices(
    tmp_path, made, sections, wanted
):
    ctx = site(tmp_path, training={"device": "cuda"}, **sections)
    make_trainer(ctx, model_of(ctx), longest=64)
    make_trainer(ctx, Critic(model_of(ctx).model), longest=64)
    make_trainer(ctx, model_of(ctx), longest=64, precision="auto", scratch=True)
    assert [options["precision"] for options in made] == [wanted, wanted, "auto"]


def test_the_trainer_recomputes_what_the_schedule_says(tmp_path, monkeypatch, made):
    for room, recompute in ((10**12, False), (10**6, True)):
        monkeypatch.setattr(memory, "memory_bytes", lambda device, room=room: room)
        ctx = site(tmp_path, training={"microbatch_tokens": 32768})
        make_trainer(ctx, model_of(ctx), longest=64)
        assert (made[-1]["row_tokens"], made[-1]["gradient_checkpointing"]) == (32768, recompute)
        planned = layout(ctx.config, shape_of_policy(ctx.config.policy), 64)
        assert (planned.row_tokens, planned.recompute) == (32768, recompute)
