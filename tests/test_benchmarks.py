"""A benchmark runs: it calls what it measures as it is today."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.nightly
def test_the_trainers_benchmark_measures_every_recipe(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    monkeypatch.delitem(sys.modules, "trainer", raising=False)
    figures = tmp_path / "figures.json"
    options = ["--episodes", "4", "--repeats", "1", "--precision", "bf16", "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", ["trainer.py", *options])
    threads = torch.get_num_threads()
    try:
        importlib.import_module("trainer").main()
    finally:
        torch.set_num_threads(threads)
    found = json.loads(figures.read_text())["tokens_per_second"]
    assert set(found) == {"sft bf16", "value bf16", "ppo bf16"}
    assert all(figure["median"] > 0 for figure in found.values())
