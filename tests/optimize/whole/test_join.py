"""Parts as tasks, and the model with solutions in it. The code is ours, so it needs no sandbox."""

import json
import os
import subprocess
import sys

import pytest
import torch

from cuda_agent.optimize.whole.join import joined
from cuda_agent.optimize.whole.larger_model import load
from cuda_agent.optimize.whole.parts import parts_of
from cuda_agent.optimize.whole.tasks import task_of
from cuda_agent.optimize.whole.tracing import trace
from cuda_agent.sandbox.wire import Solution, TaskSpec, Tensor
from cuda_agent.tasks.inspect import problems

MODEL = '''import torch


class Scale(torch.nn.Module):
    """Has a method and a weight."""

    def __init__(self, width):
        super(Scale, self).__init__()
        self.weight = torch.nn.Parameter(torch.rand(width))
        self.register_buffer("shift", torch.ones(width))

    def weighted(self, x):
        return x * self.weight

    def forward(self, x):
        return self.weighted(x) + self.shift


class Model(torch.nn.Module):
    def __init__(self, width):
        super(Model, self).__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(width, width), Scale(width), Scale(width))

    def forward(self, x):
        return self.net(torch.relu(x))


def get_inputs():
    return [torch.randn(5, 8)]


def get_init_inputs():
    return [8]
'''
PYTHON = """import torch


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(8))
        self.register_buffer("shift", torch.empty(8))

    def forward(self, x):
        return torch.addcmul(self.shift, x, self.weight)
"""
KERNEL = """void fused(long block, long grid, const float* x, const float* w, const float* s, float* y, long n) {
  for (long i = n * block / grid; i < n * (block + 1) / grid; i++) y[i] = x[i] * w[i % 8] + s[i % 8];
}
"""
NODE = {
    "kernel": "kernels/fused.cpp", "function": "fused", "grid": 1,
    "args": ["in0", "w:weight", "w:shift", "out0", "out0.numel"],
}  # fmt: skip
SOLUTIONS = {
    "python": Solution("python", {"model_new.py": PYTHON}),
    "plan": Solution("plan", {"plan.json": json.dumps({"nodes": [NODE]}), "kernels/fused.cpp": KERNEL}),
}
WEIGHTS = {"weight": Tensor((8,), "float32"), "shift": Tensor((8,), "float32")}
SPEC = TaskSpec((Tensor((5, 8), "float32"),), (Tensor((5, 8), "float32"),), WEIGHTS, ({"tensor": 0},), ())


@pytest.fixture(scope="module")
def part():
    found = trace(MODEL, "cpu", False)
    for record in found["modules"]:
        record["seconds"] = {"net": 0.9, "net.0": 0.2}.get(record["name"], 0.3)
    parts = parts_of(found | {"seconds": 1.0})
    return next(part for part in parts if part.names == ("net.1", "net.2"))


def test_the_task_of_a_part_is_the_submodule_with_its_weights_and_its_true_inputs(part):
    code = task_of(part, MODEL)
    assert problems(code) == []
    task = load(code, "part_of_a_test.py")
    torch.manual_seed(7)
    model = task.Model(*task.get_init_inputs()).eval()
    torch.manual_seed(7)
    larger = load(MODEL, "larger_of_a_test.py").Model(8).eval()
    alone = larger.get_submodule("net.1")
    assert model.state_dict().keys() == alone.state_dict().keys() == {"weight", "shift"}
    assert torch.equal(model.weight, alone.weight), "drawn as in the larger model"
    torch.manual_seed(3)
    (given,) = task.get_inputs()
    assert torch.equal(model(given), alone(given)) and (given < 0).any(), "after the Linear, not after the relu"
    torch.manual_seed(3)
    assert torch.equal(task.get_inputs()[0], given), "a seed gives the same inputs again"
    assert not torch.equal(task.get_inputs()[0], given)


CHECK = """
import torch
from model_new import Model, ModelNew

torch.manual_seed(1)
old, new = Model(8).eval(), ModelNew(8).eval()
assert list(new.state_dict()) == list(old.state_dict())
new.load_state_dict(old.state_dict())
assert type(new.net[1]).__name__ == type(new.net[2]).__name__ == "ModelNew" and type(new.net[0]) is torch.nn.Linear
with torch.no_grad():
    for _ in range(2):
        x = torch.randn(5, 8)
        torch.testing.assert_close(new(x), old(x))
"""


@pytest.mark.parametrize("format", SOLUTIONS)
def test_the_model_with_replaced_parts_has_the_same_weights_and_outputs(part, format, tmp_path):
    """In another process, as a user's: this one imports no code of the solution."""
    solution = joined(MODEL, [(part, SOLUTIONS[format], SPEC)], "cpu", False)
    assert solution.format == "python" and problems(MODEL) == []
    (tmp_path / "model_new.py").write_text(solution.files["model_new.py"])
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    child = [sys.executable, "-c", CHECK]
    done = subprocess.run(child, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
