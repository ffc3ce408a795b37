"""What is killed in the middle of a step costs at most that step: the run ends with the bytes of one in peace."""

import json
import os
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from cuda_agent.errors import EXIT_RETRY
from cuda_agent.policy.engines.broadcast import TransferError
from cuda_agent.policy.episode import EPISODES
from cuda_agent.rl.ray import broadcast as ray_broadcast
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
    killer = Killer("Trainer.update", when=step_done(tmp_path, 1))
    ctx = context(tmp_path, config(runtime="ray", **STEPS), inputs)
    warmup.run(ctx)
    assert killer.killed and learnt(tmp_path) == peace
    assert [note for note in ctx.tracker.notes() if "the trainer was lost" in note]
    assert len(ctx.checkpoints.resumed) == 1


def test_a_trainer_killed_before_any_checkpoint_begins_anew(tmp_path, inputs, peace):
    killer = Killer("Trainer.update")
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


@pytest.fixture
def broadcasts(monkeypatch):
    """What is put there happens right before the second broadcast, when its members have met."""
    plain, count, happens = ray_broadcast.WeightBroadcastGroup.transfer, [0], []

    async def transfer(circle, trainer, workers, forms):
        count[0] += 1
        if count[0] == 2:
            happens[0]()
        return await plain(circle, trainer, workers, forms)

    monkeypatch.setattr(ray_broadcast.WeightBroadcastGroup, "transfer", transfer)
    return happens


def stop(title: str, then_kill: bool):
    """Stops the first process at ``title``, so that a broadcast waits for it."""

    def act() -> None:
        pid = busy(title)[0]
        os.kill(pid, signal.SIGSTOP)
        if then_kill:
            threading.Timer(1.0, lambda: os.kill(pid, signal.SIGKILL)).start()

    return act


BROADCAST = {"runtime": "ray", "ray": {"sync": "broadcast"}, **STEPS}


def test_weights_that_are_broadcast_are_those_of_the_object_store(tmp_path, inputs, peace):
    """Also by a trainer of two ranks, whose sums are rounded otherwise."""
    ctx = context(tmp_path / "one", config(**BROADCAST), inputs)
    warmup.run(ctx)
    assert learnt(tmp_path / "one") == peace
    ranked = context(tmp_path / "two", config(**BROADCAST, training={"num_processes": 2}), inputs)
    warmup.run(ranked)
    steps = read_metrics(tmp_path / "two" / "said" / "metrics.jsonl")
    assert learnt(tmp_path / "two")[2] == pytest.approx(peace[2], abs=1e-3)
    assert max(values["train_inference_mismatch"] for values in steps.values()) < 1e-4, (
        "sampled with the newest weights"
    )
    assert not [note for note in [*ctx.tracker.notes(), *ranked.tracker.notes()] if "broadcast" in note]


def test_a_worker_killed_in_a_broadcast_is_missed_by_nobody(tmp_path, inputs, peace, broadcasts):
    broadcasts.append(stop("RolloutWorker", then_kill=True))
    ctx = context(tmp_path, config(**BROADCAST), inputs)
    warmup.run(ctx)
    assert learnt(tmp_path) == peace
    steps = read_metrics(tmp_path / "said" / "metrics.jsonl")
    assert sum(values["workers_lost"] for values in steps.values()) == 1
    assert [note for note in ctx.tracker.notes() if "could not be broadcast to 2" in note]


def test_a_worker_that_hangs_in_a_broadcast_is_waited_for_so_long_and_no_longer(
    tmp_path, inputs, peace, broadcasts, monkeypatch
):
    monkeypatch.setattr(ray_broadcast, "TRANSFER_SECONDS", 5.0)
    broadcasts.append(stop("RolloutWorker", then_kill=False))
    ctx = context(tmp_path, config(**BROADCAST), inputs)
    warmup.run(ctx)
    assert learnt(tmp_path) == peace
    assert len([note for note in ctx.tracker.notes() if "was lost: it hangs in a broadcast" in note]) == 1


def test_a_trainer_killed_in_a_broadcast_comes_back_from_the_newest_checkpoint(tmp_path, inputs, peace, broadcasts):
    broadcasts.append(stop("Trainer", then_kill=True))
    ctx = context(tmp_path, config(**BROADCAST), inputs)
    warmup.run(ctx)
    assert learnt(tmp_path) == peace
    assert [note for note in ctx.tracker.notes() if "the trainer was lost" in note]
    assert not [note for note in ctx.tracker.notes() if "rollout worker" in note and "was lost" in note]


def test_a_broadcast_that_never_works_costs_time_and_nothing_else(tmp_path, inputs, peace, monkeypatch):
    async def fail(circle, trainer, workers, forms):
        return [TransferError("no way"), *(TransferError("no way") for _ in workers)]

    monkeypatch.setattr(ray_broadcast.WeightBroadcastGroup, "transfer", fail)
    ctx = context(tmp_path, config(**BROADCAST), inputs)
    warmup.run(ctx)
    assert learnt(tmp_path) == peace
    assert [note for note in ctx.tracker.notes() if "could not be broadcast" in note]


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
