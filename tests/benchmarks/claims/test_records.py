"""The records of finished runs give the figures that the lab notebook has."""

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks" / "claims"


@pytest.fixture(scope="module")
def records():
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("claims_records", FOLDER / "records.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("learning", "seeds", "strict_answers"):
            sys.modules.pop(name, None)
    return module


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("record")
    shutil.unpack_archive(FOLDER / "records" / "cuda-2026-11-27.tar.xz", folder)
    return folder / "cuda-2026-11-27"


def mean(values, metric):
    known = [of[metric] for of in values.values() if of[metric] is not None]
    return float(np.mean(known)) if metric in ("passed", "faster_compile") else math.exp(np.mean(known))


def test_the_quick_verdicts_give_the_notebooks_table(records, record):
    found = records.values(record, [])
    table = {(0, "agentic"): (0.98, 0.69, 1.08), (2, "agentic"): (0.95, 0.58, 1.04), (0, "control"): (0.92, 0.31, 0.67)}
    for (seed, policy), wanted in table.items():
        of = found[seed][policy]
        assert len(of) == 16
        assert [round(mean(of, m), 2) for m in ("passed", "faster_compile", "speedup_compile")] == list(wanted)
    assert mean(found[0]["agentic"], "gap") == pytest.approx(1.45, abs=0.005)
    assert "agentic" not in found[1], "its evaluation was cut off"


def test_verdicts_of_evaluate_set_replace_those_of_the_runs(records, record, tmp_path, monkeypatch):
    rows = [json.loads(line) for line in (record / "answers.jsonl").read_text().splitlines()]
    first = next(row for row in rows if "plan.json" in row["files"])
    judged = records.EpisodeScore(
        f"{first['name']}, sample {first['sample']}", first["name"], "teacher", [], records.Result("wrong"),
        records.Result("wrong"), 0, 0,
    )  # fmt: skip
    monkeypatch.setattr(records, "read_scores", lambda path: records.SimpleNamespace(outcomes=[judged]))
    found = list(records.results(record, [tmp_path]))
    assert (first["sample"], first["name"], records.Result("wrong")) in found
    without = [row["sample"] for row in rows if "plan.json" not in row["files"]]
    assert sorted(sample for sample, _, result in found if result.status == "no_answer") == sorted(without)
    assert len(found) == 1 + len(without), "the others have no verdict"


def test_an_ablation_gives_its_last_policy_and_is_compared_with_the_whole_recipe(records, tmp_path, capsys):
    for run, stages in {"a": ("warmup", "one-shot"), "b": ("base", "agentic")}.items():
        for stage in stages:
            (tmp_path / run / "runs" / "one" / f"evaluate-{stage}").mkdir(parents=True)
            (tmp_path / run / "runs" / "one" / f"evaluate-{stage}" / "manifest.json").touch()
    assert records.policies_of(tmp_path / "a", "no_agent_loop") == [("no_agent_loop", "evaluate-one-shot")]
    assert records.policies_of(tmp_path / "b", "grpo") == [("grpo", "evaluate-agentic")]
    values = dict.fromkeys(records.report.__globals__["METRICS"], 0.5)
    records.report([{"seed": 0, "values": {"agentic": {"task": values}, "no_rft": {"task": values}}}], None)
    assert list(json.loads(capsys.readouterr().out)["differences"]) == ["no_rft -> agentic"]
