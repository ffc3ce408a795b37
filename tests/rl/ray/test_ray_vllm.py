"""Rollout workers with vLLM servers of their own: what they sample is the trainer's, and a server's death costs a step
at most.  Needs an environment with vLLM, as the tests of the engine do."""

import os
import signal
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from cuda_agent.errors import PolicyError
from cuda_agent.policy.engines.vllm_server import interpreter
from cuda_agent.sandbox.jail.descendants import descendants
from cuda_agent.stages import warmup
from cuda_agent.tracking import read_metrics
from tests.rl.ray.ray_cases import config, context, make_inputs

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (pip install '.[ray]')"),
]
SHAPE = {"hidden": 64, "heads": 2, "kv_heads": 1, "intermediate": 128}  # that vLLM has kernels for


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    try:
        interpreter()
    except PolicyError as error:
        pytest.skip(str(error))
    return make_inputs(tmp_path_factory.mktemp("inputs"), **SHAPE)


def servers() -> list[int]:
    found = []
    for pid in descendants(os.getpid()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"vllm.entrypoints.openai.api_server" in words:
            found.append(pid)
    return found


def test_two_replicas_play_for_one_trainer_and_one_of_them_is_killed(tmp_path, inputs):
    settings = config(
        runtime="ray",
        policy=SHAPE | {"engine": "vllm"},
        agent={"turn_tokens": 40},
        warmup={"steps": 3, "episodes_per_step": 8},
    )
    ctx = context(tmp_path, settings, inputs)
    killed: list[int] = []

    def kill() -> None:
        while not any(tmp_path.glob("store/checkpoints/warmup/key/00000001-*.json")):
            time.sleep(0.01)
        killed.append(servers()[0])
        os.kill(killed[0], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    warmup.run(ctx)
    steps = read_metrics(tmp_path / "said" / "metrics.jsonl")
    assert list(steps) == [0, 1, 2] and killed
    assert {values["episodes"] for values in steps.values()} == {8}
    assert max(values["train_inference_mismatch"] for values in steps.values()) < 1e-4, (
        "every token was sampled with the newest weights"
    )
    assert [note for note in ctx.tracker.notes() if "rollout worker" in note and "lost" in note]
    assert not servers()
