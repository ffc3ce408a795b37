"""What is killed in the middle of a step costs at most that step: the run ends with the bytes of one in peace."""

import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cuda_agent.errors import EXIT_RETRY
from cuda_agent.policy.episode import EPISODES
from cuda_agent.sandbox.jail.descendants import descendants
from cuda_agent.stages import collect, warmup
from cuda_agent.tracking import read_metrics
from tests.rl.ray.ray_cases import Killer, alive, busy, config, context, learnt, step_done, wait_until

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (pip install '.[ray]')"),
]
STEPS = {"warmup": {"steps": 3}}


@pytest.fixture(scope="module")
def peace(tmp_path_factory, inputs):
    """The final weights and the steps of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("peace")
    warmup.run(context(folder, config(**STEPS), inputs))
    return learnt(folder)


def test_a_trainer_killed_while_it_learns_comes_back_from_the_newest_checkpoint(tmp_path, inputs, peace):
    killer = Killer("TrainerActor.update", when=step_done(tmp_path, 1))
    ctx = context(tmp_path, config(runtime="ray", **STEPS), inputs)
    warmup.run(ctx)
    assert killer.killed and learnt(tmp_path) == peace
    assert [note for note in ctx.tracker.notes() if "the trainer was lost" in note]
    assert len(ctx.checkpoints.resumed) == 1


def test_a_trainer_killed_before_any_checkpoint_begins_anew(tmp_path, inputs, peace):
    killer = Killer("TrainerActor.update")
    warmup.run(context(tmp_path, config(runtime="ray", **STEPS), inputs))
    assert killer.killed and learnt(tmp_path) == peace


def test_what_a_killed_worker_played_is_played_by_the_other(tmp_path, inputs, peace):
    killer = Killer("RolloutWorker.play", when=step_done(tmp_path, 1))
    ctx = context(tmp_path, config(runtime="ray", **STEPS), inputs)
    warmup.run(ctx)
    assert killer.killed and learnt(tmp_path) == peace
    steps = read_metrics(tmp_path / "said" / "metrics.jsonl")
    assert sum(values["workers_lost"] for values in steps.values()) == 1
    assert {values["episodes"] for values in steps.values()} == {4}


def test_the_only_worker_is_replaced_when_it_is_killed(tmp_path, inputs, peace):
    killer = Killer("RolloutWorker.play")
    warmup.run(context(tmp_path, config(runtime="ray", ray={"workers": 1}, **STEPS), inputs))
    assert killer.killed and learnt(tmp_path) == peace


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_killed_where_nobody_learns_is_replaced_and_nothing_counted_twice(tmp_path, inputs, workers):
    alone = context(tmp_path / "local", config(collect={"samples": 3}), inputs, "collect")
    collect.run(alone)
    killer = Killer("RolloutWorker.play")
    settings = config(runtime="ray", ray={"workers": workers}, collect={"samples": 3})
    spread, shown = context(tmp_path / "ray", settings, inputs, "collect"), []
    spread.tracker.progress = lambda done, total, unit, **rates: shown.append(done)
    collect.run(spread)
    assert shown == [1, 2, 3, 4, 5, 6]
    assert killer.killed and [note for note in spread.tracker.notes() if "was lost" in note]
    ours, theirs = ((ctx.outputs["episodes"] / EPISODES).read_bytes() for ctx in (spread, alone))
    assert ours == theirs and ours.count(b"\n") == 6


def begin(folder: Path, inputs: dict[str, Path]) -> subprocess.Popen:
    settings = config(runtime="ray", warmup={"steps": 1000}).model_dump_json()
    command = [sys.executable, "-m", "tests.rl.ray.ray_stage", str(folder), str(inputs["policy"].parent), settings]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def folders_of(pid: int) -> list[Path]:
    return [*Path("/tmp").glob(f"cuda-agent-*-{pid}-*")]


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_of_ray_outlives_its_stage(tmp_path, inputs, signal_number):
    stage = begin(tmp_path / "stage", inputs)
    wait_until(step_done(tmp_path / "stage", 2), 300)
    wait_until(lambda: busy("RolloutWorker.play", stage.pid))
    below = descendants(stage.pid)
    session = folders_of(stage.pid)
    assert len(below) > 6 and session
    stage.send_signal(signal_number)
    said, _ = stage.communicate(timeout=120)
    if signal_number == signal.SIGTERM:
        assert stage.returncode == EXIT_RETRY and "stopped after step" in said
        assert not folders_of(stage.pid)
    wait_until(lambda: not any(alive(pid) for pid in below) and not folders_of(stage.pid), 60)
    checkpoints = [*(tmp_path / "stage").glob("store/checkpoints/warmup/key/*.json")]
    assert len(checkpoints) == 2, json.dumps([path.name for path in checkpoints])
