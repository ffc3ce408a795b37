"""What is said of two runs that differ."""

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
