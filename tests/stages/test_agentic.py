"""``agentic`` with and without a critic, on a scripted policy."""

from pathlib import Path
from shutil import copytree

import pytest

import cuda_agent
from cuda_agent.sandbox.workspace.client import Workspace, WorkspaceLost
from cuda_agent.stages import agentic
from cuda_agent.synthesis.teacher.optimum import FILE, Optimum, write_optima
from cuda_agent.tasks.io import read_tasks
from cuda_agent.training.critic import critic_from_policy, load_critic, save_critic
from tests.rl.ray.ray_cases import config, context, make_inputs, read_metrics

SETTINGS = {"steps": 1, "episodes_per_step": 4, "samples_per_prompt": 2, "minibatches": 2, "context": 1024}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def run(folder, inputs, outputs, **changes):
    """Runs the stage, with only some of the outputs that the graph declares; its first metrics."""
    ctx = context(folder, config(agentic=SETTINGS | changes), inputs, "agentic")
    ctx.outputs = {name: ctx.outputs[name] for name in outputs}
    agentic.run(ctx)
    assert (folder / "policy" / "model.safetensors").is_file()
    return read_metrics(folder / "said" / "metrics.jsonl")[0]


@pytest.mark.nightly
@pytest.mark.parametrize("advantage", ["gae", "group"])
def test_without_an_input_critic_and_a_declared_output_it_runs_and_writes_none(tmp_path, inputs, advantage):
    metrics = run(tmp_path, inputs, ["policy"], advantage=advantage)
    assert ("critic_loss" in metrics) == (advantage == "gae")
    assert not any((tmp_path / "critic").iterdir())


@pytest.mark.nightly
def test_a_declared_critic_that_nothing_trained_is_passed_on(tmp_path, inputs):
    pretrained = critic_from_policy(inputs["policy"], 0.75)
    (tmp_path / "pretrained").mkdir()
    save_critic(pretrained, tmp_path / "pretrained")
    given = inputs | {"critic": tmp_path / "pretrained"}
    metrics = run(tmp_path / "stage", given, ["policy", "critic"], advantage="rloo", reward="speedup")
    assert load_critic(tmp_path / "stage" / "critic").head.bias.tolist() == [0.75]
    assert "critic_loss" not in metrics and -1 <= metrics["reward"] < 3


@pytest.mark.nightly
def test_work_folders_that_are_lost_change_no_byte_of_the_result(tmp_path, inputs, monkeypatch):
    run(tmp_path / "peace", inputs, ["policy"])
    call, calls = Workspace.call, []

    async def lost_at_times(folder, tool, arguments):
        calls.append(tool)
        if len(calls) in (2, 5):
            raise WorkspaceLost("its pod is gone")
        return await call(folder, tool, arguments)

    monkeypatch.setattr(Workspace, "call", lost_at_times)
    assert run(tmp_path / "lost", inputs, ["policy"])["dropped"] == 0
    first, second = ((tmp_path / name / "policy" / "model.safetensors").read_bytes() for name in ("peace", "lost"))
    assert first == second and len(calls) > 5


@pytest.mark.nightly
def test_rewards_and_training_are_the_same_without_the_best_designs(tmp_path, inputs):
    known = inputs | {"tasks": copytree(inputs["tasks"], tmp_path / "tasks")}
    write_optima(known["tasks"], {task.name: Optimum("", 1e-9, 1.0) for task in read_tasks(inputs["tasks"])})
    found = []
    for name, given in (("with", known), ("without", inputs)):
        metrics = run(tmp_path / name, given, ["policy"], advantage="rloo", reward="speedup")
        reward = {key: value for key, value in metrics.items() if "reward" in key}
        found.append((reward, (tmp_path / name / "policy" / "model.safetensors").read_bytes()))
    assert found[0] == found[1] and found[0][0]


def test_no_module_reads_the_file_of_the_best_designs_by_itself():
    package = Path(cuda_agent.__file__).parent
    assert [path.name for path in package.rglob("*.py") if FILE in path.read_text()] == ["optimum.py"]
