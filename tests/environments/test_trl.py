"""TRL's GRPO learns from our rewards, as examples/trl_grpo.py says. Needs ``trl`` and ``gymnasium``."""

import subprocess
import sys
from pathlib import Path

import pytest

from cuda_agent.config import PolicyConfig
from cuda_agent.policy.model import new_policy, save_policy, train_tokenizer
from tests.environments.examples import surroundings

pytestmark = pytest.mark.nightly
pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("gymnasium", reason="gymnasium is not installed")
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_trains_a_policy_with_the_sandboxs_rewards(tmp_path):
    code = (EXAMPLES / "trl_grpo.py").read_text()
    assert sum(bool(line) for line in code.splitlines()) <= 10
    tokenizer = train_tokenizer(["relu exp sum of x"] * 8, 400)
    sizes = PolicyConfig(layers=1, hidden=32, heads=2, kv_heads=1, intermediate=64, vocab=400, context=1024)
    save_policy(new_policy(sizes, tokenizer, 0), tokenizer, tmp_path / "policy")
    short = code.replace("max_steps=40", "max_steps=1, max_completion_length=16").replace(
        "batch_size=32", "batch_size=8"
    )
    assert short != code
    command = [sys.executable, "-c", short, tmp_path / "policy", EXAMPLES / "model.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=surroundings(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "'reward': '-1'" in ended.stdout, ended.stdout  # the policy has learnt nothing before
    assert (tmp_path / "trained").is_dir()
