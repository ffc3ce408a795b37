"""What is said of two runs that differ."""

from pathlib import Path
from typing import Any

import pytest

from cuda_agent.compose import compose
from cuda_agent.pipeline import runs
from cuda_agent.pipeline.manifest import Manifest


def left_by(run: str, *overrides: str, code: str = "c", key: str = "k") -> runs.Facts:
    made = Manifest("critic", run, key, code, "e", None, "f", {"policy": "p"}, {"critic": "v"}, "m", 1.0, "2026-01-01")
    return runs.Facts(run, compose(["experiment=smoke", *overrides]), {"critic": made})


@pytest.mark.parametrize(
    ("overrides", "code", "differs"),
    [
        (["critic.lr=7e-5"], "other", {"code": ["c", "other"], "configuration": True}),
        (["critic.lr=7e-5"], "c", {"configuration": True}),
        (["seed=7"], "other", {"code": ["c", "other"], "configuration": True}),
        (["rft.lr=7e-5"], "other", {"code": ["c", "other"]}),
        (["sandbox.servers=[http://a:1]", "training.checkpointing=on"], "other", {"code": ["c", "other"]}),
    ],
)
def test_a_stage_that_differs_names_its_configuration_beside_other_reasons(
    overrides: list[str], code: str, differs: dict[str, Any]
) -> None:
    found = runs.diff(left_by("a"), left_by("b", *overrides, code=code, key="l"))
    assert found["stages"]["critic"]["differs in"] == differs
    assert found["config"].keys() >= {text.split("=")[0] for text in overrides}


def test_equal_keys_are_no_difference() -> None:
    assert runs.diff(left_by("a"), left_by("b"))["stages"] == {}


@pytest.mark.parametrize(
    "override, there, home",
    [
        ([], False, "user/cuda-agent"),
        ([], True, ".cuda-agent"),
        (["run.store=mine"], False, "mine.local"),
        (["run.store=s3://bucket/x"], True, "user/cuda-agent"),
    ],
    ids=["no-store", "a-store", "a-named-store", "s3"],
)
def test_the_cache_is_the_users_where_there_is_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: list[str], there: bool, home: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    if there:
        (tmp_path / ".cuda-agent" / "store").mkdir(parents=True)
    assert runs.cache_of(compose(override)) == tmp_path / home / "cache"
    monkeypatch.setenv("CUDA_AGENT_HOME", "own")
    assert runs.cache_of(compose(override)) == tmp_path / "own" / "cache"


def test_the_users_folder_is_in_the_cache_folder_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert runs.user_home() == Path.home() / ".cache" / "cuda-agent"
