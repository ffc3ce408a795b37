"""The final answers of a seed's policies, judged again."""

import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cuda_agent.rl.scores import EpisodeScore, Result
from cuda_agent.synthesis.teacher.optimum import Optimum

FOLDER = Path(__file__).parents[3] / "benchmarks" / "claims"
SEED = {"seed": 3, "run": "r", "control": "c"}


@pytest.fixture(scope="module")
def strict_answers():
    spec = importlib.util.spec_from_file_location("claims_strict_answers", FOLDER / "strict_answers.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(FOLDER))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("learning", None)
        sys.modules.pop("seeds", None)
    return module


def outcome(episode: str, of: str, final: Result) -> EpisodeScore:
    return EpisodeScore(episode, of, "teacher", [], final, final, 1, 10)


def test_a_strict_verdict_replaces_the_quick_one_and_a_fault_of_the_sandbox_counts_nowhere(strict_answers, monkeypatch):
    quick = Result("ok", 4.0, 3.0)
    played = [
        outcome("a/0", "a", quick), outcome("a/1", "a", quick), outcome("a/2", "a", quick),
        outcome("b/0", "b", Result("build_error")), outcome("c/0", "c", quick),
    ]  # fmt: skip
    monkeypatch.setattr(strict_answers, "scores_of", lambda *_: SimpleNamespace(outcomes=played))
    episodes = [SimpleNamespace(id=one.episode, files={} if one.task == "b" else {"plan.json": ""}) for one in played]
    monkeypatch.setattr(strict_answers, "episodes_of", lambda *_: episodes)
    changed = lambda one, **changes: type(one)(**vars(one) | changes)  # noqa: E731 - replace() wants dataclasses
    monkeypatch.setattr(strict_answers, "replace", changed)
    found = {
        f"3 {policy} {episode}": result
        for policy in ("base", "warmup", "rft", "agentic", "control")
        for episode, result in {"a/0": Result("ok", 2.0, 1.5), "a/1": Result("wrong")}.items()
    }
    optima = {"a": Optimum("", seconds=1.0, eager_seconds=3.0)}
    values = strict_answers.strict(Path("seed-3.json"), SEED, found, optima)["values"]
    assert set(values) == {"base", "warmup", "rft", "agentic", "control"}
    of = values["agentic"]
    assert set(of) == {"a", "b"}, "the sandbox failed for the answer on c"
    assert of["a"]["passed"] == 0.5, "of two judged answers"
    assert of["a"]["speedup_compile"] == pytest.approx(math.log(1.5))
    assert of["a"]["gap"] == pytest.approx(math.log(1.5)), "three times as fast as eager is possible"
    assert of["b"]["passed"] == 0.0


def test_the_answers_of_a_task_are_judged_on_one_gpu(strict_answers, tmp_path, monkeypatch):
    asked = []

    class Process:
        def __init__(self, command, env, stdout):
            asked.append((command, env["CUDA_VISIBLE_DEVICES"]))
            output = Path(command[command.index("--output") + 1])
            output.mkdir()

        def wait(self):
            return 0

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(strict_answers, "read_scores", lambda path: SimpleNamespace(outcomes=[]))
    answers = {f"0 base {n}": (f"task-{n % 3}", {"plan.json": "{}"}) for n in range(6)}
    options = SimpleNamespace(gpus=["4", "7"], processes=1, seeds=[tmp_path / "seed-0.json"], set=["experiment=cuda"])
    assert strict_answers.judge(answers, tmp_path / "tasks", tmp_path / "strict", options) == {}
    assert [gpu for _, gpu in asked] == ["4", "7"]
    names = []
    for command, _ in asked:
        records = Path(command[command.index("evaluate-set") + 1]).read_text().splitlines()
        names.append({strict_answers.json.loads(line)["name"] for line in records})
        assert command[command.index("--mode") + 1] == "strict" and command[-1] == "experiment=cuda"
    assert names == [{"task-0", "task-2"}, {"task-1"}]
