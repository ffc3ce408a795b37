"""What a server of a pool starts with; that a real one serves is in ``test_vllm``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_cases import write_policy

from cuda_agent.policy.engines import vllm_pool

ROOT = Path(__file__).parents[3]
PROGRAM = [sys.executable, "-P", "-m", "cuda_agent.policy.engines.vllm_pool"]
SETTINGS = ["--port", "8000", "--context", "64", "--batch", "4", "--memory", "0.8", "--threads", "1"]


@pytest.fixture
def policy(tmp_path, tokenizer):
    write_policy(tmp_path / "first", tokenizer, 0)
    return tmp_path / "first"


def option(line: list[str], name: str) -> str:
    return line[line.index(name) + 1]


def test_a_server_is_told_what_the_policy_and_its_machine_allow(policy):
    on_processor = vllm_pool.command(policy, 8000, 10**6, 4, 0.8, 0)
    assert option(on_processor, "--model") == str(policy) and option(on_processor, "--dtype") == "float32"
    assert 0 < int(option(on_processor, "--max-model-len")) < 10**6, "no longer than the model's positions"
    on_gpus = vllm_pool.command(policy, 8000, 64, 4, 0.8, 2)
    assert option(on_gpus, "--tensor-parallel-size") == "2" and option(on_gpus, "--gpu-memory-utilization") == "0.8"
    assert "--dtype" not in on_gpus and "--tensor-parallel-size" not in on_processor


def test_each_start_serves_under_another_name(policy):
    names = {option(vllm_pool.command(policy, 8000, 64, 4, 0.8, 0), "--served-model-name") for _ in range(3)}
    assert len(names) == 3


def test_it_waits_for_the_first_policy_and_ends_at_once_when_told(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    line = [*PROGRAM, str(tmp_path), *SETTINGS]
    waiting = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True)
    assert waiting.stdout is not None and "waiting for" in waiting.stdout.readline()
    waiting.terminate()
    assert waiting.wait(30) == 0


def test_it_needs_nothing_that_the_package_requires(tmp_path):
    """The engine's image has vLLM's requirements, and not ours."""
    allowed = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import cuda_agent.policy.engines.vllm_pool"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", allowed], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
