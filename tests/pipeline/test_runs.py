"""Where the commands that judge keep what they have measured."""

from pathlib import Path

import pytest

from cuda_agent.compose import compose
from cuda_agent.pipeline import runs


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
