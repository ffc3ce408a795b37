"""Results of earlier calls, also of older ones, seen as one."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

from cuda_agent.rl.scores import METRICS

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "claims" / "learning.py"
RATES = {"passed": 1.0, "faster_eager": 1.0, "faster_compile": 0.0}
TWICE = math.log(2)


@pytest.fixture(scope="module")
def learning():
    spec = importlib.util.spec_from_file_location("claims_learning", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return module


def results(path: Path, seed: int, solved: dict, unsolved: dict, *more: str) -> Path:
    values = {policy: {"a": solved, "b": unsolved} for policy in ("base", "agentic", "control", *more)}
    path.write_text(json.dumps({"seeds": [{"seed": seed, "run": f"r{seed}", "values": values}]}))
    return path


def test_files_of_all_ages_are_combined(learning, tmp_path, monkeypatch, capsys):
    nan = float("nan")
    older = results(
        tmp_path / "0", 0, RATES | {"eager": TWICE, "compile": TWICE}, RATES | {"eager": nan, "compile": nan}
    )
    old = {"speedup_eager": TWICE, "speedup_compile": TWICE}
    without_gap = results(tmp_path / "1", 1, RATES | old, RATES | dict.fromkeys(old))
    new = results(
        tmp_path / "2", 2, RATES | old | {"gap": TWICE}, RATES | dict.fromkeys(old) | {"gap": None}, "base, greedy"
    )
    files = [str(path) for path in (older, without_gap, new)]
    monkeypatch.setattr(sys, "argv", ["learning.py", "--combine", *files])
    learning.main()
    found = json.loads(capsys.readouterr().out)
    assert list(found["rows"]) == ["base", "agentic", "control"], "what every file has"
    assert found["rows"]["base"] == RATES | {"speedup_eager": 2.0, "speedup_compile": 2.0, "gap": 2.0}
    change = found["differences"]["base -> agentic"]
    assert list(change) == list(METRICS)
    assert (change["speedup_compile"]["tasks"], change["gap"]["tasks"]) == ([1, 1, 1], [0, 0, 1])


def test_a_file_that_holds_no_results_is_named(learning, tmp_path, monkeypatch):
    (tmp_path / "other.json").write_text('{"rows": {}}')
    monkeypatch.setattr(sys, "argv", ["learning.py", "--combine", str(tmp_path / "other.json")])
    with pytest.raises(SystemExit, match=r"other\.json has no values of seeds"):
        learning.main()
