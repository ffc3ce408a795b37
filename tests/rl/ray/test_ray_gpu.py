"""Ray's actors with a GPU each: ranks that share a trainer, and weights from the trainer to a rollout worker.

Each actor sees the one GPU that Ray gave it, as on machines of their own.
"""

from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

from cuda_agent.stages import warmup
from cuda_agent.tracking import read_metrics
from tests.rl.ray.ray_cases import config, context, learnt, of_ray

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (pip install '.[ray]')"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
STEPS = {"warmup": {"steps": 3}}


def test_ranks_on_gpus_of_two_actors_learn_what_those_of_one_process_learn(tmp_path, inputs):
    ranks = {"training": {"num_processes": 2, "device": "cuda"}, **STEPS}
    warmup.run(context(tmp_path / "one", config(**ranks), inputs))
    spread = {"runtime": "ray", "ray": {"trainers": 2, "trainer_gpus": 1, "workers": 1}}
    ctx = context(tmp_path / "two", config(**ranks, **spread), inputs)
    warmup.run(ctx)
    alone, shared = (read_metrics(tmp_path / name / "said" / "metrics.jsonl") for name in ("one", "two"))
    assert list(shared) == [0, 1, 2]
    for step, metrics in alone.items():
        for name in ("reward", "loss", "grad_norm", "critic_loss", "value_mean"):
            assert shared[step][name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-4), (step, name)
    first, second = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("one", "two"))
    before = load_file(inputs["policy"] / "model.safetensors")
    assert max(float((second[name] - before[name]).abs().max()) for name in before) > 1e-4, "it learnt"
    assert max(float((second[name] - first[name]).abs().max()) for name in before) < 1e-4
    assert not [note for note in ctx.tracker.notes() if "lost" in note] and of_ray() == []


def test_weights_go_from_the_trainers_gpu_to_the_workers(tmp_path, inputs):
    settings = config(
        runtime="ray",
        ray={"trainer_gpus": 1, "workers": 1, "worker_gpus": 1},
        policy={"engine": "local", "device": "cuda"},
        training={"device": "cuda"},
        **STEPS,
    )
    ctx = context(tmp_path, settings, inputs)
    warmup.run(ctx)
    steps = read_metrics(tmp_path / "said" / "metrics.jsonl")
    assert list(steps) == [0, 1, 2]
    assert max(values["train_inference_mismatch"] for values in steps.values()) < 1e-3, (
        "sampled with the newest weights"
    )
    assert learnt(tmp_path)[0] != (inputs["policy"] / "model.safetensors").read_bytes()
    assert not [note for note in ctx.tracker.notes() if "lost" in note] and of_ray() == []
