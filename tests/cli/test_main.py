"""The command line: what it prints, what it answers programs, how it ends."""

import io
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from drill import table
from typer.testing import CliRunner

from cuda_agent.cli import main
from cuda_agent.compose import freeze
from cuda_agent.config import Config
from cuda_agent.diagnostics.doctor import examine
from cuda_agent.errors import ConfigError
from cuda_agent.optimize.evaluation import format_of, solution_files
from cuda_agent.pipeline import gc, runs, screen
from cuda_agent.pipeline.local import StageView, run_pipeline
from cuda_agent.pipeline.manifest import Manifest, config_entry, manifest_entry
from cuda_agent.storage import open_store
from cuda_agent.tasks.io import read_tasks, write_tasks
from cuda_agent.tasks.task import Task
from tests.agent import agent_cases
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]


def call(*arguments, folder=None, **environment):
    command = [sys.executable, "-m", "cuda_agent.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, cwd=folder)


def ask(*arguments):
    """In this process, for what ends well."""
    result = CliRunner().invoke(main.app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two finished runs that differ in one setting."""
    folder = tmp_path_factory.mktemp("runs") / "store"
    for epochs in (2, 3):
        config = Config.model_validate({"run": {"store": str(folder), "mlflow": "off"}, "critic": {"epochs": epochs}})
        outcome = run_pipeline(config, stages=table.STAGES, table=table.NAME, preload=(), pause=0.05)
        assert outcome.code == 0
    return folder


def test_help_loads_nothing_heavy_and_names_every_command():
    script = (
        "import sys; sys.argv = ['cuda-agent', '--help']\n"
        "from cuda_agent.cli import main as cli\n"
        "try: cli.app()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'mlflow', 'rich', 'hydra', 'pydantic', 'pyarrow', 'numpy', 'obstore'}\n"
        "print(heavy & set(sys.modules), file=sys.stderr)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stderr.strip() == "set()"
    commands = (
        "run",
        "config",
        "runs",
        "report",
        "diff",
        "evaluate",
        "evaluate-set",
        "tune",
        "tasks",
        "gc",
        "doctor",
        "benchmark",
    )
    for command in commands:
        assert f"\n  {command} " in ended.stdout
    assert "\n  stage " not in ended.stdout, "hidden"


@pytest.mark.parametrize(
    "command", ["run", "config", "report", "diff", "evaluate", "evaluate-set", "tune", "gc", "doctor", "benchmark"]
)
def test_every_command_has_an_example(command):
    assert "cuda-agent " + command in ask(command, "--help").split("Example")[1]


def test_config_prints_configuration_and_schedule():
    text = ask("config", "experiment=smoke")
    assert "clock: model" in text and "optimizer steps" in text
    answer = json.loads(ask("config", "experiment=paper", "--json"))
    assert answer["schedule"]["stages"]["agentic"].pop("seconds") > 24 * 3600
    assert answer["schedule"]["stages"]["agentic"] == {
        "samples": 150 * 1024,
        "tokens": 150 * 1024 * 131072,
        "optimizer_steps": 150,
        "memory": None,
    }
    small = json.loads(ask("config", "experiment=smoke", "--json"))["schedule"]["stages"]
    assert small["agentic"]["memory"] > small["rft"]["memory"] > 0 and "memory" not in small["collect"]


@pytest.mark.parametrize("command", [["run"], ["sweep", "--on", "local", "seed=1,2"]])
@pytest.mark.parametrize("base", ["my-model/", "/nonexist", "./mine", "~/mine", "a/b/c"])
def test_a_base_that_is_no_folder_is_refused_before_anything_runs(tmp_path, command, base):
    where = f"run.store={tmp_path}/store"
    result = CliRunner().invoke(main.app, [*command, "experiment=smoke", f"policy.base='{base}'", where])
    assert isinstance(result.exception, ConfigError) and result.exception.exit_code == 78
    assert str(result.exception) == f"policy.base: there is no folder {base} with a model"
    assert not (tmp_path / "store").exists()


def test_a_base_that_is_a_folder_with_a_model_or_may_be_of_the_hub_is_taken(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for base in (f"{tmp_path}/", tmp_path, "org/name"):
        assert f"base: {base}" in ask("config", "experiment=smoke", f"policy.base={base}")
    elsewhere = call("config", "experiment=smoke", "policy.base=/in/the/pods")
    assert elsewhere.returncode == 0 and "note: policy.base: there is no folder /in/the/pods" in elsewhere.stderr


def test_runs_lists_them_oldest_first(store):
    rows = json.loads(ask("runs", "--store", store, "--json"))
    assert [row["status"] for row in rows] == ["done", "done"]
    assert rows[0]["created"] <= rows[1]["created"]
    assert rows[1]["name"] in ask("runs", "--store", store)


def test_report_says_where_it_lies_and_gives_its_data(store):
    page = Path(ask("report", "last", "--store", store).strip())
    assert page.name == "index.html" and page.exists()
    assert "config.json" in json.loads(ask("report", "last", "--store", store, "--json"))


def test_an_unknown_run_is_answered_with_those_there_are(store):
    ended = call("report", "nosuch", "--store", store)
    assert ended.returncode == 78 and "no such run" in ended.stderr and "Traceback" not in ended.stderr
    assert runs.list_runs(open_store(store))[0].name in ended.stderr


def test_a_stage_of_a_log_may_be_named_as_an_option(store):
    name = runs.list_runs(open_store(store))[-1].name
    open_store(store).put(f"runs/{name}/critic/log.txt", b"one\ntwo\n")
    for named in (["critic"], ["--stage", "critic"], ["critic", "--stage", "critic"]):
        assert ask("logs", "last", *named, "--store", store) == "one\ntwo\n"
    two = CliRunner().invoke(main.app, ["logs", "last", "rft", "--stage", "critic", "--store", str(store)])
    assert str(two.exception) == "logs: expected one stage, got rft and critic."


def test_diff_names_the_setting_and_what_followed_from_it(store):
    one, other = (run.name for run in runs.list_runs(open_store(store)))
    found = json.loads(ask("diff", one, other, "--store", store, "--json"))
    assert found["config"] == {"critic.epochs": [2, 3]}
    assert set(found["stages"]) <= {"report"}, "the drill's own stages are not in the graph"
    assert "critic.epochs: 2 -> 3" in ask("diff", one, other, "--store", store)
    assert "nothing differs" in ask("diff", one, one, "--store", store)


@pytest.fixture
def sweep(tmp_path):
    """A store with a finished sweep of two runs, with scores, and a run that is none of it."""
    opened = open_store(tmp_path / "store")
    for name, seed, of in (("s-1", 1, "s"), ("s-2", 2, "s"), ("alone", 3, None)):
        config = Config.model_validate({"seed": seed, "run": {"name": name, "sweep": of}})
        text, sha256 = freeze(config)
        opened.create(config_entry(sha256), text.encode())
        done = {}
        for policy, passed in (("base", 0.25), ("agentic", seed / 4)):
            made = Manifest(
                f"evaluate-{policy}", name, "k", "c", "e", None, sha256, {}, {}, "m", 1.0, "2026",
                scores={"passed": passed, "speedup_compile": 1.5},
            )  # fmt: skip
            done[made.stage] = made
            opened.put(manifest_entry(name, made.stage), made.to_bytes())
        runs.end_run(opened, runs.create_run(opened, config, sha256), 0, "", "", done)
    return tmp_path / "store"


def test_runs_are_listed_with_their_last_scores(sweep):
    head, *lines = ask("runs", "--store", sweep).splitlines()
    assert head.split()[:7] == ["run", "pipeline", "state", "stages", "begun", "by", "config"] and "x compile" in head
    assert [line.split()[7:] for line in lines[:3]] == [
        ["agentic", passed, "–", "–", "–", "1.50"] for passed in ("25.0%", "50.0%", "75.0%")
    ]
    assert all(line.rindex("1.50") + 4 == head.rindex("x compile") + 9 for line in lines[:3]), "below its title"
    rows = json.loads(ask("runs", "--store", sweep, "--json"))
    assert [(row["policy"], row["scores"]["passed"]) for row in rows] == [
        ("agentic", 0.25), ("agentic", 0.5), ("agentic", 0.75),
    ]  # fmt: skip


def test_the_report_of_a_sweep_is_a_table(sweep):
    lines = [line.split() for line in ask("report", "s", "--store", sweep).splitlines()]
    assert lines[0][:3] == ["sweep", "s", "policy"]
    assert [line[:4] for line in lines[1:]] == [
        ["s-1", "seed=1", "agentic", "25.0%"],
        ["s-2", "seed=2", "agentic", "50.0%"],
    ]
    found = json.loads(ask("report", "s", "--store", sweep, "--json"))
    assert found["sweep"] == "s" and [row["settings"] for row in found["runs"]] == [{"seed": 1}, {"seed": 2}]
    ended = call("report", "s-", "--store", sweep)
    assert ended.returncode == 78 and "several match" in ended.stderr, "the beginning of a sweep's name is none"
    assert "has no report yet" in call("report", "alone", "--store", sweep).stderr


def test_diff_begins_with_the_scores(sweep):
    lines = [line.split() for line in ask("diff", "s-1", "s-2", "--store", sweep).splitlines()]
    assert lines[0] == ["s-1", "->", "s-2"] and lines[1][0] == "pass"
    assert [line[:3] for line in lines[2:4]] == [["agentic", "s-1", "25.0%"], ["agentic", "s-2", "50.0%"]]
    assert "base" not in [line[0] for line in lines], "it has the same scores in both"
    found = json.loads(ask("diff", "s-1", "s-2", "--store", sweep, "--json"))
    assert [scores["passed"] for scores in found["scores"]["agentic"]] == [0.25, 0.5]


def test_looking_at_a_store_that_is_not_there_makes_none(tmp_path):
    ended = call("runs", "--store", tmp_path / "none")
    assert ended.returncode == 75 and "no store" in ended.stderr
    assert not (tmp_path / "none").exists()


def test_gc_removes_what_no_kept_run_needs_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(gc, "YOUNG", -1.0)
    folder = tmp_path / "store"

    def run(epochs):
        config = Config.model_validate({"run": {"store": str(folder), "mlflow": "off"}, "critic": {"epochs": epochs}})
        return run_pipeline(config, stages=table.STAGES, table=table.NAME, preload=(), pause=0.05)

    first, second = run(2), run(3)
    store = open_store(folder)
    store.put("cas/" + "0" * 64, b"nobody's")
    store.put("checkpoints/train/old/00000001-a.json", b"{}")
    plan = gc.plan(store, keep=1, days=0)
    assert plan.runs == [first.run]
    gc.collect(store, plan)
    assert [r.name for r in runs.list_runs(store)] == [second.run]
    assert not store.exists("cas/" + "0" * 64) and not store.list("checkpoints")
    assert all(store.has_folder(d) for m in second.manifests.values() for d in [*m.outputs.values(), m.metrics])
    again = run(3)
    assert again.code == 0 and {n: m.outputs for n, m in again.manifests.items()} == {
        n: m.outputs for n, m in second.manifests.items()
    }
    assert gc.plan(store, keep=10, days=0).keys == {}


def test_gc_dry_run_removes_nothing(store):
    before = open_store(store).list("")
    assert "would be removed" in ask("gc", "--keep", "1", "--dry-run", "--store", store)
    assert open_store(store).list("") == before


def test_a_check_that_breaks_says_why_in_one_line(tmp_path, monkeypatch):
    def broken():
        raise ValueError("no number\nand more")

    monkeypatch.setattr("cuda_agent.diagnostics.doctor._memory", broken)
    found = {check.name: check for check in examine(str(tmp_path / "store"), "sqlite:///m.db")}
    assert not found["memory"].ok and found["memory"].text == "could not be checked: ValueError: no number"


def test_doctor_has_a_line_a_check_and_a_mend_for_what_is_missing(tmp_path):
    checks = list(examine(str(tmp_path / "none" / "store"), "http://127.0.0.1:9"))
    by_name = {check.name: check for check in checks}
    assert not any(tmp_path.iterdir()), "it leaves no folder"
    assert by_name["store"].ok and by_name["disk"].text.endswith("GiB free")
    assert by_name["python"].ok and by_name["headers"].ok
    assert not by_name["mlflow"].ok and "run.mlflow=off" in by_name["mlflow"].mend
    assert all(check.mend for check in checks if not check.ok)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "plan.json"),
        ({"kernels/a.cpp": "x"}, "no plan.json"),
    ],
)
def test_a_solution_without_the_named_files_is_refused_clearly(tmp_path, files, said):
    task = tmp_path / "model.py"
    task.write_text("class Model:\n    def forward(self): ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...\n")
    folder = tmp_path / "solution"
    folder.mkdir()
    for path, text in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    ended = call("evaluate", task, folder)
    assert ended.returncode == 78 and said in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("files", "format"),
    [
        ({"plan.json": "{}"}, "plan"),
        ({"plan.json": "{}", "model_new.py": "x"}, "plan"),
        ({"model_new.py": "import torch\n\nclass ModelNew: ..."}, "python"),
        ({"model_new.py": "import torch\nimport cuda_extension\n", "kernels/k.cu": "x"}, "extension"),
        ({"model_new.py": "import torch, triton\nimport triton.language as tl\n"}, "triton"),
        ({"notes.md": "x"}, "plan"),
    ],
)
def test_the_format_of_a_solution_is_that_of_its_files(tmp_path, files, format):
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    assert format_of(solution_files(tmp_path), "cpu") == format
    assert format_of(solution_files(tmp_path), "cuda") == format.replace("triton", "python")


def test_a_wrong_solution_has_an_exit_code_of_its_own_and_the_folder_stays_as_it_is(tmp_path):
    task, folder = tmp_path / "model.py", tmp_path / "solution"
    task.write_text(agent_cases.CODE)
    folder.mkdir()
    wrong = agent_cases.CODE.replace("class Model(", "class ModelNew(").replace("x + 0.5", "x + 7")
    (folder / "model_new.py").write_text(wrong)
    here = tmp_path / "here"
    here.mkdir()
    ended = call(
        "evaluate", task, folder, "--mode", "check", "--device", "cpu", "--json",
        folder=here, XDG_CACHE_HOME=str(tmp_path / "cache"), PYTHONPATH=str(ROOT),
    )  # fmt: skip
    verdict = json.loads(ended.stdout)
    assert (ended.returncode, verdict["status"], verdict["format"]) == (79, "wrong", "python"), ended.stderr
    assert not any(here.iterdir()) and (tmp_path / "cache" / "cuda-agent" / "cache").is_dir()


def test_the_version_is_that_of_the_package():
    assert call("--version").stdout == f"cuda-agent {version('cuda-agent')}\n"


@pytest.mark.parametrize("code", ["import (", "x = 1"])
def test_a_task_file_that_is_none_is_refused_clearly(tmp_path, code):
    (tmp_path / "model.py").write_text(code)
    ended = call("evaluate", tmp_path / "model.py", tmp_path)
    assert ended.returncode == 78 and "model.py" in ended.stderr and "Traceback" not in ended.stderr


def test_evaluate_that_is_terminated_leaves_no_temporary_folder(tmp_path):
    temporary, solution = tmp_path / "tmp", tmp_path / "solution"
    for folder in (temporary, solution):
        folder.mkdir()
    (tmp_path / "model.py").write_text(agent_cases.CODE)
    (solution / "plan.json").write_text("{}")
    command = [sys.executable, "-m", "cuda_agent.cli", "evaluate", tmp_path / "model.py", solution]
    process = subprocess.Popen(
        [*command, f"run.store={tmp_path}/store"], env=os.environ | {"TMPDIR": str(temporary)}, start_new_session=True
    )
    wait_for("the sandbox's folder", 60, lambda: list(temporary.glob("cuda-agent-sandbox-*/judge-0")))
    os.killpg(process.pid, signal.SIGTERM)  # as `timeout` does
    assert process.wait(60) == 143
    assert not list(temporary.glob("cuda-agent-*"))


def test_benchmark_wants_a_policy_or_an_address(tmp_path):
    for arguments in ([], ["--base-url", "http://127.0.0.1:9/v1"], ["one", "two"]):
        ended = call("benchmark", *arguments, "--tasks", tmp_path)
        assert ended.returncode == 78 and "benchmark:" in ended.stderr and "Traceback" not in ended.stderr


def test_benchmark_names_what_was_chosen_and_is_not_there(tmp_path):
    (tmp_path / "KernelBench" / "level1").mkdir(parents=True)
    (tmp_path / "KernelBench" / "level1" / "19_ReLU.py").write_text(agent_cases.TASK.code)
    server = ["--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--tasks", tmp_path]
    for more, said in (
        (["--levels", "2"], "there is no task of level 2, only of 1"),
        (["--levels", "x"], "benchmark: --levels: expected numbers"),
        (["--only", "19_Relu"], "there is no task 19_Relu; did you mean 19_ReLU?"),
    ):
        ended = call("benchmark", *server, *more)
        assert ended.returncode == 78 and said in ended.stderr and "Traceback" not in ended.stderr


def test_tasks_are_imported_and_shown(tmp_path):
    code = (
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return torch.relu(x)\n"
        "def get_inputs():\n    return [torch.randn(4)]\ndef get_init_inputs():\n    return []\n"
    )
    (tmp_path / "level1").mkdir()
    (tmp_path / "level1" / "1_relu.py").write_text(code)
    assert json.loads(ask("tasks", "import", tmp_path, tmp_path / "set", "--json"))["tasks"] == 1
    (tmp_path / "level1" / "helper.py").write_text("x = 1")
    text = ask("tasks", "import", tmp_path, tmp_path / "set")
    assert "1 tasks in" in text and "dropped as no task: 1\n" in text and "helper.py: not a task: no class" in text
    assert "torch.relu" in ask("tasks", "show", tmp_path / "set")
    assert ask("tasks", "show", tmp_path / "set", "level1/1_relu") == code + "\n"


def test_the_tasks_of_a_run_are_imported_with_their_split(store, tmp_path):
    opened, code = open_store(store), agent_cases.TASK.code
    write_tasks(tmp_path / "made", [Task("a", code, ("torch.mul",), "torch#1", "teacher", "heldout")])
    name = runs.list_runs(opened)[-1].name
    facts = {"seconds": 1.0, "finished": "2026-01-01T00:00:00Z", "device": None, "inputs": {}}
    texts = dict.fromkeys(("key", "code", "environment", "config", "metrics"), "")
    ended = call("tasks", "import", "last", tmp_path / "set", "--store", store)
    assert ended.returncode == 78 and f"stage synthesis of run {name} has made no tasks" in ended.stderr
    made = Manifest("synthesis", name, **texts, **facts, outputs={"tasks": opened.put_folder(tmp_path / "made")})
    opened.put(manifest_entry(name, "synthesis"), made.to_bytes())
    assert "1 tasks in" in ask("tasks", "import", "last", tmp_path / "set", "--store", store)
    (task,) = read_tasks(tmp_path / "set")
    assert (task.name, task.family, task.split) == ("a", "teacher", "heldout")
    for wrong in ("nosuch", "KernelBench/", "v1.2"):
        ended = call("tasks", "import", wrong, tmp_path / "set", "--store", store)
        assert ended.returncode == 78 and name in ended.stderr
        assert f"{wrong.rstrip('/')}: no such file or folder, and no run" in ended.stderr
    ended = call("tasks", "import", "no/such", tmp_path / "set", "--store", store)
    assert ended.returncode == 78 and "no such file" in ended.stderr


def test_plain_lines_tell_changes_once():
    lines = []
    watch = screen.plain(lines.append)
    view = StageView("train", 1.0)
    watch("r", [view])
    view.state, view.attempt = "running", 1
    watch("r", [view])
    view.notes.append("a note")
    watch("r", [view])
    view.state, view.seconds = "done", 65.0
    watch("r", [view])
    watch("r", [view])
    assert lines == ["run r", "train: running", "train: a note", "train: done (1:05)"]


def test_the_live_table_fits_and_shows_progress():
    from rich.console import Console

    console = Console(width=100, record=True, file=io.StringIO())
    views = [
        StageView(name, 1.0, state=state) for name, state in (("one", "done"), ("two", "running"), ("three", "waiting"))
    ]
    views[1].done, views[1].total, views[1].unit, views[1].rates = 3, 6, "steps", {"tokens_per_second": 1234.5}
    console.print(screen._table("run-1", views, 100))
    text = console.export_text()
    assert "3/6 steps" in text and "1,234 tokens/s" in text and max(map(len, text.splitlines())) <= 100


def test_a_stage_that_does_not_exist_is_named():
    ended = call("run", "--to", "warmdown")
    assert ended.returncode == 78 and "warmdown" in ended.stderr and "warmup" in ended.stderr
    assert "Traceback" not in ended.stderr
