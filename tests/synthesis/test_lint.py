"""Linting a task set: the command on tasks that are sound, weak and broken, and what it prints and writes."""

import csv
import json

import pytest
from typer.testing import CliRunner

from cuda_agent.cli import main
from cuda_agent.errors import TaskError
from cuda_agent.sandbox.wire import Probe
from cuda_agent.synthesis.lint import lint_lines, write_csv

TASK = """import torch
import torch.nn.functional as F
class Model(torch.nn.Module):
    def forward(self, x):
        return {result}
def get_inputs():
    return [torch.randn(2, 1048576)]
def get_init_inputs():
    return []
"""


def test_the_command_names_what_passes_and_writes_every_mutant(tmp_path):
    folder = tmp_path / "level1"
    folder.mkdir()
    for name, result in (("1_relu", "torch.relu(x)"), ("2_norm", "F.layer_norm(x, (1048576,))"), ("3_none", "x @ x")):
        (folder / f"{name}.py").write_text(TASK.format(result=result))
    table, store = tmp_path / "lint.csv", f"run.store={tmp_path}/store"
    ended = CliRunner().invoke(
        main.app, ["tasks", "lint", str(folder), "sandbox.clock=model", store, "--csv", str(table), "--json"]
    )
    assert ended.exit_code == 1, ended.output
    relu, norm, none = json.loads(ended.stdout)
    assert relu["lets_through"] == {} and relu["mutants"]["zeros"] is None and relu["mutants"]["bf16"] == 0.01
    assert norm["lets_through"] == {"copy of input 0": 0.01}
    assert "RuntimeError" in none["error"] and none["mutants"] == {}
    assert "3/3" in ended.stderr and "2_norm: copy of input 0 (0.01)" in ended.stderr
    rows = list(csv.DictReader(table.open()))
    assert [row["least_tolerance"] for row in rows if row["mutant"].startswith("copy")] == ["", "0.01"]
    assert [row["mutant"] for row in rows if row["error"]] == [""]


def test_the_table_has_a_row_a_task_and_a_summary():
    sound, weak = {"zeros": None, "bf16": 1e-2, "1.01x": 1e-2}, {"zeros in output 0": 1e-2, "zeros in output 1": 1e-3}
    probes = {
        "sound": Probe(deterministic=True, mutants=sound),
        "weak": Probe(deterministic=True, mutants=weak | {"bf16": None}),
        "random": Probe(mutants=sound),
        "broken": Probe(error="TypeError: \x1b[2J"),
    }
    lines = lint_lines(probes, 1e-2)
    assert lines[1:5] == [
        "sound   0.01    none",
        "weak    no      zeros in output 0 (0.01), zeros in output 1 (0.001)",
        "random  0.01    not deterministic",
        "broken  –       does not run: TypeError:  [2J",
    ]
    assert lines[-2:] == ["4 tasks at tolerance 0.01: wrong answers pass in 1, 1 cannot be run", "     1 zeros"]


def test_a_table_that_cannot_be_written_is_one_clear_error():
    with pytest.raises(TaskError, match=r"/proc/x.csv: cannot be written"):
        write_csv("/proc/x.csv", {})
