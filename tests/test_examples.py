"""The examples do what their README says."""

import importlib.util
import json
import threading
from pathlib import Path

import pytest
import torch

from cuda_agent import api

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def settings(tmp_path):
    return ["sandbox.memory_mb=4096", f"run.store={tmp_path}/store"]


@pytest.mark.parametrize(
    "name",
    [
        "plan",
        pytest.param("extension", marks=pytest.mark.nightly),
        pytest.param("python", marks=pytest.mark.nightly),
        pytest.param("triton", marks=pytest.mark.nightly),
    ],
)
def test_each_solution_is_correct(settings, name):
    verdict = api.evaluate(EXAMPLES / "model.py", EXAMPLES / name, mode="check", device="cpu", overrides=settings)
    assert (verdict.status, verdict.message, verdict.format) == ("ok", "", name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_solution_for_a_gpu_is_correct(settings):
    verdict = api.evaluate(EXAMPLES / "model.py", EXAMPLES / "plan_cuda", device="cuda", overrides=settings)
    assert verdict.status == "ok" and verdict.speedup_eager > 1


@pytest.mark.nightly
def test_the_notebook_runs(settings, monkeypatch, capsys):
    cells = json.loads((EXAMPLES / "judge.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    whole = api.evaluation.settings_for
    monkeypatch.setattr(
        api.evaluation,
        "settings_for",
        lambda files, words, *rest: whole(files, [*words, *settings, "sandbox.clock=model"], *rest),
    )
    monkeypatch.chdir(EXAMPLES)
    names: dict[str, object] = {}
    for cell in code:
        exec(cell, names)
    said = capsys.readouterr().out
    assert names["verdict"].status == "ok" and "x torch.compile" in said and "wrong check 1" in said


@pytest.mark.nightly
def test_a_search_with_the_scripted_server_ends_well(settings, tmp_path):
    spec = importlib.util.spec_from_file_location("scripted_server", EXAMPLES / "scripted_server.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.serve(0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        outcome = api.optimize(
            EXAMPLES / "model.py", base_url=f"http://127.0.0.1:{server.server_port}/v1", model="scripted",
            output=tmp_path / "out", device="cpu", overrides=[*settings, "sandbox.clock=model"],
        )  # fmt: skip
        server.shutdown()
    assert outcome.best is not None and (tmp_path / "out" / "report.html").exists()
