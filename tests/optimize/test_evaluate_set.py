"""A set of finished solutions in the real sandbox: verdicts, claims, faults, a kill in the middle, the page."""

import contextlib
import csv
import io
import json
import subprocess
import sys

import pytest
from markupsafe import escape

from cuda_agent.config import SandboxConfig
from cuda_agent.machine import processor_facts
from cuda_agent.optimize import evaluate_set as module
from cuda_agent.optimize.evaluate_set import evaluate_set, result_lines
from cuda_agent.optimize.folder import OptimizeError
from cuda_agent.optimize.solution_set import read_set
from cuda_agent.tasks.io import read_any
from tests import made_once
from tests.sandbox.service.serving import ONE_JUDGE, QUICK, TOKEN, Served
from tests.waiting import wait_for

MODEL = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
def get_inputs():
    return [torch.randn(64, 32)]
def get_init_inputs():
    return []
"""
NEW = MODEL.replace("Model(", "ModelNew(").split("def get_inputs")[0]
BROKEN_TASK = MODEL.replace("return [torch", "raise ValueError('no inputs')\n    return [torch")
WRONG = NEW.replace("torch.relu(x)", "torch.relu(x) + 1")
HANGS = "import time\n" + NEW.replace("return torch.relu(x)", "time.sleep(60)")
CODES = (NEW, WRONG, HANGS, HANGS + "# again")  # in any order, one hangs when the first verdict is there
SETTINGS = SandboxConfig(clock="model", format="python")


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks" / "level1"
    folder.mkdir(parents=True)
    (folder / "19_ReLU.py").write_text(MODEL)
    (folder / "20_Broken.py").write_text(BROKEN_TASK)
    (folder / "21_Unsolved.py").write_text(MODEL.replace("64", "32"))
    return tmp_path / "tasks"


def record(code, number=19, **more):
    return {"level_id": 1, "task_id": number, "custom_code": code, **more}


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def judge(tmp_path, tasks, loop, sandbox, monkeypatch):
    """Judges a set in the shared sandbox, and keeps the lines of progress in ``judge.said``."""

    @contextlib.asynccontextmanager
    async def shared(settings, cache):
        yield sandbox

    def work(path, hear=lambda line: None):
        work.said.clear()

        def say(line):
            work.said.append(line)
            hear(line)

        given = read_set(path, read_any(tasks), "python")
        return loop.run(evaluate_set(SETTINGS, tmp_path, given, "quick", tmp_path / "out", say))

    work.said = []
    monkeypatch.setattr(module, "open_sandbox", shared)
    return work


def table(folder):
    return list(csv.DictReader(io.StringIO((folder / "results.csv").read_text())))


def test_every_record_is_accounted_for_with_its_reason(tmp_path, judge):
    path = write(
        tmp_path / "set.jsonl", record(NEW, score_default=2.0), record(WRONG, score_default=9.5),
        record("import nothing_here"), record("None"), record(NEW, 20), record(NEW, 77), "{", record(NEW),
    )  # fmt: skip
    result = judge(path)
    outcomes = [row.outcome for row in result.rows]
    assert outcomes == ["ok", "wrong", outcomes[2], "no_solution", "task_error", "no_task", "unreadable", "ok"]
    assert outcomes[2] in ("build_error", "crash") and "nothing_here" in result.rows[2].message
    assert sum(result.to_json()["outcomes"].values()) == 8
    assert "check 1" in result.rows[1].message and "no inputs" in result.rows[4].message
    assert len((tmp_path / "out" / "verdicts.jsonl").read_text().splitlines()) == 3, "equal records are judged once"

    rows = table(tmp_path / "out")
    assert [row["outcome"] for row in rows] == outcomes and rows[0]["claim_eager"] == "2.0"
    assert float(rows[0]["speedup_eager"]) > 0 and not rows[1]["speedup_eager"]
    # Two of five records of the task are correct, of which one has no code; one of two tasks that count has no record.
    assert result.tasks == 2 and result.scores.tasks == 3
    assert result.to_json()["fast_p_of_judged"][0]["eager"] == 0.4 and result.to_json()["fast_p"][0]["eager"] == 0.2
    assert result.scores.best.overall.passed == 1.0, "the best sample of the task"
    found = result.to_json()["claims"]
    assert found["all"] == 2 and found["rejected"] == 1 and found["measured"] == result.rows[0].speedup_eager

    lines = result_lines(result)
    unreadable = next(index for index, line in enumerate(lines) if " unreadable " in line)
    assert "such as: no JSON: " in lines[unreadable + 1]
    assert sum("such as: " in line for line in lines) == 4, "a reason for each outcome that is no verdict"

    page = (tmp_path / "out" / "report.html").read_text()
    assert all(f'<th scope="row">{outcome.replace("_", " ")}</th>' in page for outcome in set(outcomes))
    assert '<th scope="row">all</th><td class="figure">8</td>' in page and "check 1" in page
    assert str(escape(processor_facts()["model name"])) in page, "a time says little without its machine"


def test_the_same_command_judges_only_what_is_new_or_changed(tmp_path, judge):
    path = write(tmp_path / "set.jsonl", record(NEW), record(WRONG))
    judge(path)
    with open(tmp_path / "out" / "verdicts.jsonl", "a") as file:
        file.write('{"key": "cut by a ki')
    assert "0 to judge, 2 judged before" in (judge(path), judge.said[0])[1]
    result = judge(write(path, record(NEW), record(WRONG + "# changed"), record(NEW + "# new")))
    assert (
        "2 to judge, 1 judged before" in judge.said[0]
        and "cut by" not in (tmp_path / "out" / "verdicts.jsonl").read_text()
    )
    assert [row.outcome for row in result.rows] == ["ok", "wrong", "ok"]


@pytest.mark.nightly
def test_a_fault_of_the_sandbox_is_tried_again_and_never_charged_to_a_solution(tmp_path, judge, sandbox, monkeypatch):
    def revive(line):
        if "tried again" in line:
            for handle in sandbox._judges:
                handle._killed = False

    path = write(tmp_path / "set.jsonl", record(NEW + "# of this test"), record(WRONG + "# of this test"))
    try:
        sandbox.kill()
        monkeypatch.setattr(module, "PAUSES", ())
        lost = judge(path)
        assert [row.outcome for row in lost.rows] == ["infra", "infra"] and "judge was ended" in lost.rows[0].message
        assert lost.scores.infra == 2 and lost.scores.final.overall.tasks == 0 and lost.tasks == 2
        assert not (tmp_path / "out" / "verdicts.jsonl").read_text()
        monkeypatch.setattr(module, "PAUSES", (0.01,))
        result = judge(path, revive)
    finally:
        for handle in sandbox._judges:
            handle._killed = False
            handle.close()  # a killed judge is started anew by the next request
    assert "2 to judge" in judge.said[0] and [row.outcome for row in result.rows] == ["ok", "wrong"]


def test_a_folder_with_other_files_is_left_alone(tmp_path, judge):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.csv").write_text("mine")
    with pytest.raises(OptimizeError, match="holds other files"):
        judge(write(tmp_path / "set.jsonl", record(NEW)))
    assert (tmp_path / "out" / "results.csv").read_text() == "mine"
    (tmp_path / "out" / "verdicts.jsonl").write_text("{}\n")
    with pytest.raises(OptimizeError, match="holds no verdicts to go on with"):
        judge(write(tmp_path / "set.jsonl", record(NEW)))


def command(tmp_path, *arguments):
    program = f"{ONE_JUDGE}\nfrom cuda_agent.cli import main\nmain.main()"
    made_once.share(tmp_path / "cache")  # beside the store
    settings = ["sandbox.clock=model", "sandbox.run_seconds=2", f"run.store={tmp_path}/store"]
    return [sys.executable, "-c", program, "evaluate-set", *map(str, arguments), *settings]


def begun(file):
    wait_for("a verdict", 60, lambda: file.exists() and file.read_text().count("\n"))


@pytest.mark.nightly
def test_a_killed_run_goes_on_with_the_same_command(tmp_path, tasks):
    run, out = tmp_path / "runs" / "mine", tmp_path / "out"
    run.mkdir(parents=True)
    for sample, code in enumerate(CODES):
        (run / f"level_1_problem_19_sample_{sample}_kernel.py").write_text(code)
    line = command(tmp_path, run, "--tasks", tasks, "--output", out, "--json")
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path) as process:
        try:
            begun(out / "verdicts.jsonl")
        finally:
            process.kill()
    before = (out / "verdicts.jsonl").read_text()
    known = before.count("\n")
    ended = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert known < 4 and f"{4 - known} to judge, {known} judged before" in ended.stderr
    assert (out / "verdicts.jsonl").read_text().startswith(before)
    answer = json.loads(ended.stdout)
    assert answer["outcomes"] == {"ok": 1, "wrong": 1, "timeout": 2}
    assert (out / "report.html").exists() and answer["csv"] == str(out / "results.csv")


@pytest.mark.nightly
def test_servers_judge_a_set_and_a_stopped_run_says_what_is_missing(tmp_path, tasks, monkeypatch):
    monkeypatch.setenv("CUDA_AGENT_SANDBOX_TOKEN", TOKEN)
    path, out = write(tmp_path / "set.jsonl", *map(record, CODES)), tmp_path / "out"
    with Served(tmp_path, *QUICK, wrapper=ONE_JUDGE) as served:
        served.ready()
        line = command(tmp_path, path, "--tasks", tasks, "--output", out, f"sandbox.servers=['{served.address}']")
        line += ["sandbox.checks=2", "sandbox.memory_mb=400"]
        with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path) as process:
            try:
                begun(out / "verdicts.jsonl")
            finally:
                process.terminate()
        assert process.returncode == 143
        pending = [row["outcome"] for row in table(out)].count("pending")
        assert 0 < pending < 4 and "not judged yet" in (out / "report.html").read_text()
        ended = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0 and f"{pending} to judge, {4 - pending} judged before" in ended.stderr, ended.stderr
    assert [row["outcome"] for row in table(out)] == ["ok", "wrong", "timeout", "timeout"]
    assert "     2 timeout" in ended.stdout and "report.html" in ended.stdout
