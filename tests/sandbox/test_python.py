"""The python lane: KernelBench's form, one model_new.py whose Python runs free inside the jail."""

import pytest

from cuda_agent.sandbox.wire import Solution
from tests.sandbox.conftest import Running, task
from tests.sandbox.test_extension import LINEAR

HONEST = """
import torch
class ModelNew(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, x):
        return x.clamp_min(0).mul_(self.scale)
"""


def solution(code: str) -> Solution:
    return Solution("python", {"model_new.py": code})


def test_a_right_solution_passes_and_its_verdict_is_advisory(running: Running) -> None:
    verdict = running.evaluate(task(), solution(HONEST))
    assert (verdict.status, verdict.message) == ("ok", "")
    assert verdict.advisory and verdict.to_json()["advisory"] and verdict.checks == 5


def test_weights_of_the_same_names_are_the_references(running: Running) -> None:
    code = LINEAR.replace("class Model(", "class ModelNew(").replace("torch.nn.Linear(width, 5)", "Late(width, 5)")
    late = "class Late(torch.nn.Linear):\n    def reset_parameters(self):\n        self.weight.data.zero_()\n"
    code = code.replace("class ModelNew(", late + "\n\nclass ModelNew(").replace("self.bias", "self.bias")
    assert running.evaluate(task(LINEAR, "linear"), solution(code)).status == "ok"


def test_weights_under_other_names_are_built_from_the_same_random_numbers(running: Running) -> None:
    code = LINEAR.replace("class Model(", "class ModelNew(").replace("self.linear", "self.renamed")
    assert running.evaluate(task(LINEAR, "linear"), solution(code)).status == "ok"


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("def broken(:", "build_error", "model_new.py:1"),
        ("import torch", "build_error", "defines no ModelNew"),
        ("import nothing_like_it", "build_error", "nothing_like_it"),
        (HONEST.replace("clamp_min(0)", "clamp_min(0.1)"), "wrong", "check 1"),
        (HONEST.replace("x.clamp_min(0).mul_(self.scale)", "x.clamp_min(0)[:4]"), "crash", "float32"),
    ],
)
def test_a_wrong_solution_is_told_what_is_wrong(running: Running, code: str, status: str, said: str) -> None:
    verdict = running.evaluate(task(), solution(code))
    assert verdict.status == status and said in verdict.message


CHEATS = {
    "exit with success": "import os\nos._exit(0)",
    "exit while called": HONEST.replace("return x.clamp", "import os; os._exit(0)\n        return x.clamp"),
    "patched comparison": "import torch\ntorch.allclose = lambda *a, **k: True\n"
    "torch.testing.assert_close = lambda *a, **k: None\n" + HONEST.replace("x.clamp_min(0)", "x.clamp_min(9)"),
    "patched clock": "import time\ntime.perf_counter = lambda: 0.0\n" + HONEST.replace("x.clamp_min(0)", "x.clone()"),
    "stale output": HONEST.replace(
        "return x", "self.y = getattr(self, 'y', None)\n        if self.y is None: self.y = x"
    ).replace(".clamp_min(0).mul_(self.scale)", ".clamp_min(0) * self.scale\n        return self.y"),
    "zeroed inputs": HONEST.replace("return x", "x.zero_(); return x"),
    "found answers": HONEST.replace(
        "return x.clamp_min(0).mul_(self.scale)",
        "import gc\n        of = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.shape == x.shape]\n"
        "        return of[-1].clone()",
    ),
    "fallback to the reference": HONEST.replace(
        "return x", "import task\n        return task.Model(self.scale)(x) if 1 else x"
    ),
    "lazy tensor": HONEST.replace(
        "return x.clamp_min(0).mul_(self.scale)",
        "class Lazy(torch.Tensor): pass\n        return torch.empty_like(x).as_subclass(Lazy)",
    ),
    "empty memory": HONEST.replace("return x.clamp_min(0).mul_(self.scale)", "return torch.empty_like(x)"),
    "forged answer": "import os, struct\nfor d in range(3, 64):\n"
    "    try: os.write(d, struct.pack('<BBHI', 61, 0, 0, 0) * 9)\n"
    "    except OSError: pass\n" + HONEST.replace("x.clamp_min(0)", "x.clone()"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_refused(running: Running, name: str) -> None:
    verdict = running.evaluate(task(), solution(CHEATS[name]))
    assert verdict.status in ("wrong", "cheat", "crash", "build_error"), verdict
    assert verdict.reward == -1
    assert running.evaluate(task(), solution(HONEST)).status == "ok"
