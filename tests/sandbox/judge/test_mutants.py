"""Mutants: which wrong answers to a task the judge's comparison lets through, at which tolerance."""

from typing import Any

import pytest

from cuda_agent.sandbox.wire import ROUNDING
from tests.sandbox.conftest import Running, task
from tests.sandbox.judge.test_weights import module

_INPUTS = "\ndef get_inputs():\n    return [{inputs}]\n\ndef get_init_inputs():\n    return []\n"
_ROWS = "torch.randn(2, 1048576)"


def mutants(running: Running, result: str, inputs: str, parts: str = "pass") -> dict[str, Any]:
    arguments = ", ".join("xyz"[: inputs.count("torch.")])
    code = module("Model", parts, result).replace("forward(self, x)", f"forward(self, {arguments})")
    probe = running.probe(task(code + _INPUTS.format(inputs=inputs)))
    assert not probe.error
    return probe.mutants


def passing(found: dict[str, Any]) -> set[str]:
    return {name for name, least in found.items() if least and name not in ROUNDING}


@pytest.mark.parametrize(
    ("result", "inputs", "parts", "names"),
    [
        ("F.layer_norm(x, (1048576,))", _ROWS, "pass", {"copy of input 0"}),
        ("F.layer_norm(x, (16,))", "torch.randn(8, 16)", "pass", set()),
        ("x.flatten()", "torch.randn(8, 16)", "pass", {"copy of input 0"}),
        ("torch.relu(x) * 0", "torch.randn(8, 16)", "pass", {"zeros", "constant", "2x", "inputs ignored"}),
        ("torch.sigmoid(x) * 1e-9", "torch.randn(8, 16)", "pass", set()),
        ("torch.exp(x * 1e-4)", "torch.randn(8, 16)", "pass", {"constant", "inputs ignored"}),
        ("x.mean().expand(4)", "torch.randn(8, 16)", "pass", {"constant"}),
        ("F.mse_loss(x, y)", "torch.randn(9, 65536), torch.randn(9, 65536)", "pass", {"input 0 ignored",
         "input 1 ignored", "inputs ignored"}),
        ("x + 1e-4 * y", "torch.randn(8, 16), torch.randn(8, 16)", "pass", {"copy of input 0", "input 1 ignored"}),
        ("(x * 2, y > 9)", "torch.randn(8, 16), torch.randn(8, 16)", "pass",
         {"zeros in output 1", "constant in output 1", "input 1 ignored"}),
        ("x.long()", "torch.randn(8, 16) * 9", "pass", set()),
        ("torch.log(-x.abs() - 1)", "torch.randn(8, 16)", "pass", {"constant", "2x", "inputs ignored"}),
        ("torch.softmax(self.w(x), 0)", "torch.randn(1, 16)", "self.w = nn.Linear(16, 8)",
         {"constant", "weights ignored", "inputs ignored"}),
        ("torch.relu(self.w(x))", "torch.randn(8, 16)", "self.w = nn.Linear(16, 8)", set()),
        ("self.w(x)", "torch.randn(8, 16)", "self.w = nn.LayerNorm(16)", set()),
        ("self.w(x)", "torch.randn(8, 4, 9)", "self.w = nn.BatchNorm1d(4)", set()),
        ("torch.relu(x)", "torch.randn(8, 16)", "self.w = nn.Linear(16, 8)", {"weights ignored"}),
        ("x * self.w", "torch.randn(8, 16)", "self.register_buffer('w', torch.tril(torch.ones(8, 16)))", set()),
        ("x * self.w", "torch.randn(8, 16)", "self.w = nn.Parameter(torch.arange(16.0))", {"weights ignored"}),
    ],
    ids=[
        "wide_layer_norm", "narrow_layer_norm", "a_view", "zeros", "tiny", "nearly_constant", "one_value_a_draw",
        "a_loss_of_many_values", "one_input_hardly_counts", "one_output_is_constant", "integers", "nothing_finite",
        "cancelled_weights", "linear", "affine", "running_statistics", "unused_weights", "a_mask", "one_and_the_same",
    ],
)  # fmt: skip
def test_a_task_lets_through(running: Running, result: str, inputs: str, parts: str, names: set[str]) -> None:
    assert passing(mutants(running, result, inputs, parts)) == names


def test_the_least_tolerance_that_lets_a_mutant_through_is_told(running: Running) -> None:
    wide = mutants(running, "F.layer_norm(x, (1048576,))", _ROWS)
    assert wide["copy of input 0"] == 1e-2 and wide["zeros"] is None
    assert mutants(running, "x + 1e-5 * y", "torch.randn(8, 16), torch.randn(8, 16)")["input 1 ignored"] == 1e-4


def test_rounding_is_reported_and_counts_against_no_task(running: Running) -> None:
    probe = running.probe(task())
    assert {name: probe.mutants[name] for name in ROUNDING} == {"bf16": 1e-2, "1.01x": 1e-2}
    assert probe.lets_through == {} and probe.mutants["2x"] is None


@pytest.mark.parametrize("failure", ["None.fail", "__import__('os')._exit(1)"], ids=["an_error", "the_worker_ends"])
def test_inputs_that_the_reference_cannot_mix_are_left_out(running: Running, failure: str) -> None:
    fitting = "*(lambda x: [x, x[0].clone()])(torch.randn(8, 16))"
    code = module("Model", "pass", f"x + y if torch.equal(x[0], y) else {failure}").replace("(self, x)", "(self, x, y)")
    probe = running.probe(task(code + _INPUTS.format(inputs=fitting)))
    assert probe.error == "" and probe.mutants["zeros"] is None and "input 1 ignored" not in probe.mutants
