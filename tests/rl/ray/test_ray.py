"""Ray's actors play and learn what one process does."""

from importlib.util import find_spec

import pytest
import torch

from cuda_agent.policy.engines.engine import EngineError
from cuda_agent.policy.engines.vllm_plugin import digest
from cuda_agent.policy.episode import EPISODES
from cuda_agent.policy.lora import adapters, attach, merged_parameters
from cuda_agent.policy.model import load_model
from cuda_agent.rl.ray.transfer import arrays, load_weights
from cuda_agent.stages import collect, warmup
from cuda_agent.tracking import read_metrics
from tests.rl.ray.ray_cases import config, context, of_ray

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (pip install '.[ray]')")


def learnt(folder):
    """The final weights, and what was measured on the way, but for how long things took."""
    steps = read_metrics(folder / "said" / "metrics.jsonl")
    measured = [{k: v for k, v in values.items() if "second" not in k} for values in steps.values()]
    return (folder / "policy" / "model.safetensors").read_bytes(), measured


@pytest.mark.nightly
@pytest.mark.parametrize("changes", [{}, {"advantage": "rloo", "reward": "speedup"}], ids=["gae", "rloo"])
def test_a_stage_in_rays_actors_gives_the_bytes_of_one_process(tmp_path, inputs, changes):
    folders = {}
    for runtime in ("local", "ray"):
        folders[runtime] = tmp_path / runtime
        warmup.run(context(folders[runtime], config(runtime=runtime, warmup=changes), inputs))
    weights, measured = learnt(folders["ray"])
    for values in measured:
        assert (values.pop("cut"), values.pop("workers_lost"), values["stale"]) == (0, 0, 0)
    assert (weights, measured) == learnt(folders["local"])
    assert len(measured) == 2 and measured[0]["pass_rate"] > 0
    assert all(("critic_loss" in values) == (not changes) for values in measured)
    assert weights != (inputs["policy"] / "model.safetensors").read_bytes()
    assert of_ray() == []


@pytest.mark.nightly
def test_a_stage_that_only_plays_gives_the_bytes_of_one_process(tmp_path, inputs):
    """Two rounds, with the progress that a person sees; ``evaluate`` plays in the same way."""
    played, shown = {}, []
    for runtime in ("local", "ray"):
        ctx = context(tmp_path / runtime, config(runtime=runtime), inputs, "collect")
        ctx.tracker.progress = lambda done, total, unit, **rates: shown.append((done, total))
        collect.run(ctx)
        played[runtime] = (tmp_path / runtime / "episodes" / EPISODES).read_bytes()
        assert ctx.tracker.notes() == []
    assert played["ray"] == played["local"] and played["ray"].count(b"\n") == 4
    assert shown == 2 * [(done, 4) for done in (1, 2, 3, 4)]
    assert of_ray() == []


def test_weights_travel_merged(inputs):
    """The workers' models know nothing of adapters."""
    model, plain = load_model(inputs["policy"]), load_model(inputs["policy"])
    attach(model, 2, 8.0, ["q_proj", "down_proj"])
    with torch.no_grad():
        for layer in adapters(model).values():
            layer.up.normal_()
    before = digest(plain.named_parameters())
    weights = arrays(merged_parameters(model))
    load_weights(plain, weights)
    assert digest(plain.named_parameters()) == digest(merged_parameters(model)) != before
    with pytest.raises(EngineError, match="arrived with digest"):
        load_weights(plain, weights, before)
    with pytest.raises(EngineError, match="weights of another model"):
        load_weights(plain, weights | {"lm_head.weight": weights["model.norm.weight"]})
