"""Results of earlier calls, also of older ones, seen as one."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

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


def test_seeds_side_by_side_share_tasks_and_have_a_gpu_each(learning, tmp_path, monkeypatch):
    asked, began = [], []

    def start(overrides, *options, gpu=None):
        (tmp_path / "store" / "tasks" / "cas").mkdir(parents=True)
        (tmp_path / "store" / "tasks.local" / "cache").mkdir(parents=True)
        asked.append((overrides, options, gpu))

    class Process:
        def __init__(self, command, env, stdout):
            began.append((command, env["CUDA_VISIBLE_DEVICES"]))

        def wait(self):
            return 0

    monkeypatch.setattr(learning, "start", start)
    monkeypatch.setattr(learning.subprocess, "Popen", Process)
    chosen = ["--experiment", "cuda", "--seeds", "3", "4", "--gpus", "2", "5", "--set", "synthesis.seed=0"]
    options = learning.parse([*chosen, "--store", f"{tmp_path}/store"])
    files = learning.side_by_side(options)
    ((overrides, arguments, gpu),) = asked
    assert arguments == ("--to", "synthesis") and gpu == "2"
    assert {"experiment=cuda", "synthesis.seed=0", f"run.store={tmp_path}/store/tasks"} <= set(overrides)
    assert [gpu for _, gpu in began] == ["2", "5"]
    for seed, (command, _), file in zip((3, 4), began, files, strict=True):
        assert (tmp_path / "store" / f"seed-{seed}" / "cas").is_dir(), "it has the tasks"
        assert (tmp_path / "store" / f"seed-{seed}.local" / "cache").is_dir(), "it has their baselines"
        measured = learning.parse(command[command.index(str(learning.__file__)) + 1 :])
        assert measured.seeds == [seed] and not measured.gpus and measured.json == file
        assert measured.set == ["synthesis.seed=0"] and measured.experiment == "cuda"


def test_as_many_gpus_as_seeds_are_needed(learning, capsys):
    with pytest.raises(SystemExit):
        learning.parse(["--seeds", "0", "1", "--gpus", "0"])
    assert "--gpus: expected one for each of 2 seeds, got 1" in capsys.readouterr().err


def test_the_control_takes_as_long_as_the_stages_that_the_graph_has(learning, tmp_path, monkeypatch):
    took = {"warmup": 100.0, "collect": 20.0, "rft": 3.0, "agentic": 200.0}  # experiment=cuda has no critic
    asked = []

    def start(overrides, *options):
        asked.append((overrides, options))
        return f"run-{len(asked)}"

    monkeypatch.setattr(learning, "start", start)
    monkeypatch.setattr(
        learning, "read_manifest",
        lambda store, run, stage: SimpleNamespace(seconds=took[stage]) if stage in took else None,
    )  # fmt: skip
    monkeypatch.setattr(learning, "values_of", lambda store, run, control: {})
    monkeypatch.setattr(learning, "heldout_loss", lambda store, run: 0.0)
    options = learning.parse(["--store", f"{tmp_path}/store", "--base-seconds", "60"])
    assert learning.measure(0, options)["learning_seconds"] == 323.0
    (_, _), (overrides, which) = asked
    assert which == ("--to", "evaluate-base") and "bootstrap.max_seconds=383" in overrides
