"""The Python API: three lines from a model and a solution to a verdict, also inside a running event loop."""

import asyncio
import re
from pathlib import Path

import pytest

from cuda_agent import api
from cuda_agent.errors import ConfigError, TaskError
from cuda_agent.optimize.folder import OptimizeError
from cuda_agent.tasks.io import read_any
from tests.agent import agent_cases
from tests.optimize.chat_server import call, said, serve

NEW = agent_cases.CODE.replace("class Model(", "class ModelNew(")
SETTINGS = ["sandbox.clock=model", "sandbox.memory_mb=2048"]


@pytest.fixture
def settings(tmp_path):
    return [*SETTINGS, f"run.store={tmp_path}/store"]


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(agent_cases.CODE)
    return path


def test_a_solution_in_a_folder_is_judged(tmp_path, model, settings):
    (tmp_path / "solution").mkdir()
    (tmp_path / "solution" / "model_new.py").write_text(NEW)
    verdict = api.evaluate(model, tmp_path / "solution", device="cpu", overrides=settings)
    assert (verdict.status, verdict.format) == ("ok", "python")
    assert verdict.speedup_eager and verdict.speedup_compile


def test_a_wrong_solution_is_a_verdict_and_no_error_inside_a_running_loop(model, settings):
    async def notebook():
        files = {"model_new.py": NEW.replace("x + 0.5", "x + 7")}
        task = api.load_task(model)
        return api.evaluate(task, files, mode="check", device="cpu", overrides=settings)

    verdict = asyncio.run(notebook())
    assert verdict.status == "wrong" and "check 1" in verdict.message


def test_what_cannot_be_judged_raises(tmp_path, model, settings):
    with pytest.raises(TaskError, match=r"the solution: no plan\.json"):
        api.evaluate(model, {"notes.md": "x"}, device="cpu", overrides=settings)
    with pytest.raises(TaskError, match="no such file"):
        api.evaluate(tmp_path / "absent.py", {"model_new.py": NEW}, device="cpu")
    with pytest.raises(ConfigError):
        api.evaluate(model, {"model_new.py": NEW}, device="cpu", overrides=["sandbox.no_such=1"])


def test_a_task_of_a_set_is_chosen_by_name(tmp_path):
    for name in ("1_one", "2_two"):
        (tmp_path / "level1").mkdir(exist_ok=True)
        (tmp_path / "level1" / f"{name}.py").write_text(agent_cases.CODE)
    with pytest.raises(TaskError, match="expected one task, got 2"):
        api.load_task(tmp_path)
    names = sorted(task.name for task in read_any(tmp_path))
    assert api.load_task(tmp_path, names[0]).name == names[0]


@pytest.mark.nightly
def test_the_page_about_the_api_can_be_typed(tmp_path, model, settings, monkeypatch, capsys):
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "my-solution").mkdir()
    (tmp_path / "my-solution" / "model_new.py").write_text(NEW)
    monkeypatch.chdir(tmp_path)
    whole = api.evaluation.settings_for
    quick = lambda files, overrides, *rest: whole(files, [*overrides, *settings, "sandbox.device=cpu"], *rest)  # noqa: E731
    monkeypatch.setattr(api.evaluation, "settings_for", quick)
    for block in blocks:
        exec(block, {})
    assert len(blocks) == 2 and capsys.readouterr().out.startswith("ok ")


@pytest.mark.nightly
def test_a_search_gives_its_outcome(tmp_path, model, settings):
    events = []
    files = {"kernels/fused.cpp": agent_cases.KERNEL, "plan.json": agent_cases.PLAN}.items()
    work = [[{"calls": [call("Write", path=path, content=text) for path, text in files]}]]
    work += [[{"calls": [call("Bash", command="profile")]}], [{"text": "I am done."}]]
    with serve(said(work)) as served:
        outcome = api.optimize(
            model, base_url=served.url, model="scripted", output=tmp_path / "out", device="cpu",
            overrides=settings, watch=events.append, turns=6, target=1.01,
        )  # fmt: skip
    assert outcome.best is not None and (tmp_path / "out" / "model_new.py").exists()
    assert {"begin", "verdict", "ended"} <= {event["kind"] for event in events}


def test_a_search_whose_solutions_could_not_be_timed_is_refused(tmp_path, model, settings):
    with pytest.raises(OptimizeError, match="--format triton --device cpu"):
        api.optimize(
            model, base_url="http://127.0.0.1:9/v1", model="m", output=tmp_path / "out", device="cpu", format="triton",
            overrides=settings, target=float("inf"),
        )  # fmt: skip
    assert not (tmp_path / "out").exists() and api.optimize.__name__ == "optimize"


def test_the_package_is_typed():
    assert (Path(api.__file__).parent / "py.typed").exists()
