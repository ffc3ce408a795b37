"""A trainer whose ranks are on several machines, which here are actors of one."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_agent.errors import TryAgain
from cuda_agent.rl.ray import transfer
from cuda_agent.rl.ray.transfer import keep, parts
from cuda_agent.sandbox.jail.descendants import descendants
from cuda_agent.stages import warmup
from cuda_agent.tracking import read_metrics
from tests.rl.ray.ray_cases import Killer, config, context, learnt, of_ray, step_done

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (pip install '.[ray]')")
SPREAD = {
    "runtime": "ray",
    "ray": {"trainers": 2, "workers": 1},
    "training": {"num_processes": 2},
    "warmup": {"steps": 3},
}


@settings(max_examples=50, deadline=None)
@given(files=st.dictionaries(st.sampled_from(["a", "b.pt", "c/d", "c/e/f"]), st.binary(max_size=20)))
def test_a_folder_in_parts_is_the_folder(files, tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("folder"), tmp_path_factory.mktemp("made")
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "PART_BYTES", 8)
        for part in parts(folder):
            assert len(part[1]) <= 8
            keep(part, made)
    assert {p.relative_to(made).as_posix(): p.read_bytes() for p in made.rglob("*") if p.is_file()} == files


@pytest.fixture(scope="module")
def peace(tmp_path_factory, inputs):
    """What two ranks of one machine learn."""
    folder = tmp_path_factory.mktemp("peace")
    warmup.run(context(folder, config(**SPREAD | {"runtime": "local"}), inputs))
    return learnt(folder)


def ranks(hosts: list[int]) -> list[int]:
    """Processes of the ranks that these actors hold: forks of the process that such processes are forked from."""
    found = []
    for host in hosts:
        below = [pid for pid in descendants(host) if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        found += [pid for one in below for pid in descendants(one)]
    return found


@needs_ray
@pytest.mark.nightly
def test_ranks_of_two_machines_learn_what_those_of_one_learn(tmp_path, inputs, peace):
    warmup.run(context(tmp_path, config(**SPREAD), inputs))
    assert learnt(tmp_path) == peace and len(peace[1]) == 3
    assert peace[0] != (inputs["policy"] / "model.safetensors").read_bytes()
    assert of_ray() == []


@needs_ray
@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["machine", "rank"])
def test_what_is_killed_in_a_step_costs_that_step(tmp_path, inputs, peace, victim):
    killer = Killer(
        "RankHost.call",
        when=step_done(tmp_path, 1),
        of=(lambda hosts: hosts) if victim == "machine" else ranks,
    )
    ctx = context(tmp_path, config(**SPREAD), inputs)
    warmup.run(ctx)
    assert killer.killed and learnt(tmp_path) == peace
    assert len([note for note in ctx.tracker.notes() if "the trainer was lost" in note]) == 1


@needs_ray
@pytest.mark.nightly
def test_a_stage_goes_on_with_another_number_of_machines(tmp_path, inputs, peace):
    first = context(tmp_path, config(**SPREAD), inputs)
    first.should_stop = lambda: True
    with pytest.raises(TryAgain, match="stopped after step 1 of 3"):
        warmup.run(first)
    alone = config(**SPREAD | {"ray": {"workers": 1}, "training": {"num_processes": 1}})
    again = context(tmp_path, alone, inputs)
    warmup.run(again)
    assert again.checkpoints.resumed == [1]
    weights, steps, rewards = learnt(tmp_path)
    assert (steps, rewards[:2]) == (peace[1], pytest.approx(peace[2][:2], abs=1e-3))
    assert "reward" in read_metrics(tmp_path / "said" / "metrics.jsonl")[2]
    assert os.path.getsize(inputs["policy"] / "model.safetensors") == len(weights)
