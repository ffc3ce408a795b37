"""Solutions that bring their own compilers: a first pass that may start programs, and a second one that finds its fruit."""

import os
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.sandbox import first_pass
from cuda_agent.sandbox.wire import Solution, Verdict
from tests.sandbox.conftest import Running, task

MODEL = """
import torch
PREPARE
class ModelNew(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, x):
        FORWARD
"""
HONEST = "return torch.relu(x) * self.scale"


def solution(prepare: str = "", forward: str = HONEST, **files: str) -> Solution:
    code = MODEL.replace("PREPARE", prepare).replace("FORWARD", forward)
    return Solution("python", {"model_new.py": code, **files})


COMPILED = solution("@torch.compile\ndef chain(x, scale):\n    return torch.relu(x) * scale", "return chain(x, self.scale)")


def test_torch_compile_works_and_is_compiled_once(running: Running) -> None:
    verdict = running.evaluate(task(), COMPILED)
    assert (verdict.status, verdict.message) == ("ok", "")
