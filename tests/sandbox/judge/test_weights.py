"""Weights: a solution is checked with others than the constructor's zeros and ones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cuda_agent.sandbox.judge import prepared
from cuda_agent.sandbox.wire import Mode, Solution, Tensor, Verdict
from cuda_agent.sandbox.worker.values.weights import PlainWeights
from tests.sandbox.conftest import Running, task
from tests.sandbox.judge.fakes import SPEC, Pool, Reference, settings_in

_MODULE = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        {parts}

    def forward(self, x):
        return {result}
"""
_INPUTS = "\ndef get_inputs():\n    return [torch.randn({shape})]\n\ndef get_init_inputs():\n    return []\n"


def module(name: str, parts: str, result: str) -> str:
    lines = "\n        ".join(part.strip() for part in parts.split(";"))
    return _MODULE.format(name=name, parts=lines, result=result)


def judged(
    running: Running, reference: tuple[str, str, str], solution: tuple[str, str], mode: Mode = "quick"
) -> Verdict:
    parts, result, shape = reference
    one = task(module("Model", parts, result) + _INPUTS.format(shape=shape))
    files = {"model_new.py": module("ModelNew", *solution)}
    verdict: Verdict = running.wait(running.sandbox.evaluate(one, Solution("python", files), mode))
    return verdict


CONV = (
    "self.conv = nn.Conv2d(3, 4, 3); self.bn = nn.BatchNorm2d(4)",
    "torch.relu(self.bn(self.conv(x)))",
    "2, 3, 8, 8",
)
NORM = ("self.ln = nn.LayerNorm(24)", "self.ln(x)", "5, 24")
BIAS = (
    "self.linear = nn.Linear(16, 5); nn.init.zeros_(self.linear.bias); self.shift = nn.Parameter(torch.zeros(5))",
    "self.linear(x) + self.shift",
    "6, 16",
)
GATE = ("self.gate = nn.Parameter(torch.ones(1))", "torch.relu(x) * self.gate", "6, 16")
FROZEN = (
    "self.register_buffer('weight', torch.ones(16)); self.register_buffer('bias', torch.zeros(16))",
    "x * self.weight + self.bias",
    "6, 16",
)


@pytest.mark.parametrize(
    ("reference", "solution"),
    [
        (CONV, ("self.conv = nn.Conv2d(3, 4, 3)", "torch.relu(self.conv(x))")),
        (CONV, (CONV[0], "torch.relu(self.conv(x))")),
        (NORM, ("pass", "F.layer_norm(x, (24,))")),
        (NORM, (NORM[0], "F.layer_norm(x, (24,))")),
        (BIAS, (BIAS[0], "x @ self.linear.weight.t() + self.shift")),
        (BIAS, (BIAS[0], "self.linear(x)")),
        (GATE, ("pass", "torch.relu(x)")),
        (FROZEN, ("pass", "x")),
    ],
    ids=[
        "batch_norm_deleted", "batch_norm_kept_and_not_called", "affine_deleted", "affine_kept_and_not_used",
        "zero_bias", "zero_parameter", "gate_of_one", "buffers_of_ones_and_zeros",
    ],
)  # fmt: skip
def test_what_holds_for_the_constructors_zeros_and_ones_alone_is_wrong(
    running: Running, reference: tuple[str, str, str], solution: tuple[str, str]
) -> None:
    assert judged(running, reference, solution).status == "wrong"


def test_strict_mode_checks_with_other_weights_too(running: Running) -> None:
    assert judged(running, NORM, (NORM[0], "F.layer_norm(x, (24,))"), "strict").status == "wrong"


MASKED = (
    "self.register_buffer('mask', torch.tril(torch.ones(8, 8)));"
    " self.register_buffer('box', torch.full((3,), 1 / 3)); self.register_buffer('steps', torch.zeros(3).long())",
    "torch.softmax((x @ x.transpose(1, 2)).masked_fill(self.mask == 0, -1e9), -1) @ x * self.box.sum()",
    "2, 8, 16",
)


@pytest.mark.parametrize(
    ("reference", "solution"),
    [
        (CONV, CONV[:2]),
        (
            CONV,
            (
                "self.conv = nn.Conv2d(3, 4, 3); self.bn = nn.BatchNorm2d(4); self.w = None",
                "(self.fold(), torch.relu(F.conv2d(x, self.w, self.b)))[1]\n\n    def fold(self):\n"
                "        if self.w is None:\n"
                "            s = self.bn.weight / (self.bn.running_var + self.bn.eps).sqrt()\n"
                "            self.w = self.conv.weight * s.view(-1, 1, 1, 1)\n"
                "            self.b = (self.conv.bias - self.bn.running_mean) * s + self.bn.bias",
            ),
        ),
        (
            NORM,
            (
                "self.w = nn.Parameter(torch.ones(24)); self.b = nn.Parameter(torch.zeros(24))",
                "F.layer_norm(x, (24,), self.w, self.b)",
            ),
        ),
        (BIAS, ("self.f = nn.Linear(16, 5); self.s = nn.Parameter(torch.zeros(5));"
                " nn.init.zeros_(self.f.bias)", "F.linear(x, self.f.weight, self.f.bias) + self.s")),
        (BIAS, (BIAS[0] + "; self.turned = self.linear.weight.t().contiguous()",
                "torch.addmm(self.linear.bias, x, self.turned) + self.shift")),
        (MASKED, ("pass", "F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=1.0)")),
    ],
    ids=["the_same", "folded_at_the_first_call", "other_names", "other_names_of_equal_shapes",
         "turned_in_the_constructor", "a_mask_that_is_known"],
)  # fmt: skip
def test_what_holds_for_all_weights_is_ok(
    running: Running, reference: tuple[str, str, str], solution: tuple[str, str]
) -> None:
    verdict = judged(running, reference, solution)
    assert (verdict.status, verdict.message) == ("ok", "")


def test_weights_stay_where_others_make_the_reference_not_finite_and_the_verdict_says_so(running: Running) -> None:
    only_ones = ("self.one = nn.Parameter(torch.ones(4))", "torch.where(self.one == 1, x, torch.nan)", "3, 4")
    verdict = judged(running, only_ones, (only_ones[0], "x * 1"))
    assert verdict.status == "ok"
    assert [line for line in verdict.advice if "checked with the weights of the constructor alone" in line]


def test_plain_weights_are_drawn_near_the_constructors_values_and_the_others_stay() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.LayerNorm(3), nn.Embedding(4, 3, padding_idx=0))
    model.register_buffer("mask", torch.tril(torch.ones(3, 3)))
    model.register_parameter("eye", nn.Parameter(torch.eye(3)))
    model.register_buffer("shown", torch.ones(1).expand(3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        weights = PlainWeights(model)
        weights.draw(7)
        drawn = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        weights.draw(7)
        assert all(torch.equal(tensor, drawn[name]) for name, tensor in model.state_dict().items())
        weights.draw(None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    changed = {name for name in before if not torch.equal(before[name], drawn[name])}
    assert changed == {f"1.{n}" for n in ("weight", "bias", "running_mean", "running_var")} | {
        "2.weight", "2.bias", "eye",
    }  # fmt: skip
    assert drawn["1.running_var"].min() >= 0.5 and (drawn["1.weight"] != drawn["2.weight"]).all()
    assert ((drawn["eye"] != 0) == (before["eye"] != 0)).all()


def test_every_trial_has_other_weights_and_the_model_clock_has_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    class WithWeights(Reference):
        def __init__(self, *_: Any) -> None:
            super().__init__()
            self.spec = replace(SPEC, weights={"w": Tensor((2,), "float32")})

        def draw_weights(self, seed: int) -> bool:
            seeds.append(seed)
            return True

    monkeypatch.setattr(prepared, "ReferenceClient", WithWeights)
    real: Any = Pool(settings_in(tmp_path, clock="real"))
    one = prepared.PreparedTask("", "d", real)
    for _ in range(2):
        one.draw_weights()
    entry, later = one.entry(0), one.entry(1)
    inputs, outputs = later.inputs, later.outputs
    assert len(seeds) == 1 and one.entry(0) is entry
    one.rotate(used=1)
    one.draw_weights()
    assert len(set(seeds)) == len(seeds) == 2
    assert one.entry(1).inputs is inputs and one.entry(1).outputs is not outputs, "they were those of other weights"
    seeds.clear()
    for _ in range(2):
        fixed: Any = Pool(settings_in(tmp_path, clock="model"))
        two = prepared.PreparedTask("", "d", fixed)
        two.draw_weights()
        two.draw_weights()
    assert len(seeds) == 2 and len(set(seeds)) == 1


def test_models_run_in_eval_and_on_demand_in_train(running: Running, start: Callable[..., Running]) -> None:
    of_the_batch = (CONV[0], "torch.relu(F.batch_norm(self.conv(x), None, None, self.bn.weight, self.bn.bias, True))")
    assert judged(running, CONV, of_the_batch).status == "wrong"
    train = start(clock="model", train_mode=True)
    for solution in (of_the_batch, CONV[:2]):
        verdict = judged(train, CONV, solution)
        assert (verdict.status, verdict.message) == ("ok", "")
    of_running = (CONV[0].replace("nn.BatchNorm2d(4)", "nn.BatchNorm2d(4).eval()"), f"(self.bn.eval(), {CONV[1]})[1]")
    assert judged(train, CONV, of_running).status == "wrong"
