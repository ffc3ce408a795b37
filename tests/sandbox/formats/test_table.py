"""The table of formats, and what derives from it."""

import hashlib
from typing import get_args

import pytest

from cuda_agent.agent.skill import skill_text
from cuda_agent.agent.tools import solution_of
from cuda_agent.config import SandboxConfig
from cuda_agent.format_names import Format
from cuda_agent.sandbox.formats.table import FORMATS
from cuda_agent.sandbox.worker.candidate import RULES

FOLDER = {
    path: "" for path in ("plan.json", "model_new.py", "kernels/a.cpp", "notes.md", "model.py", "other/model_new.py")
}
# The texts are training data: a change of one is a change of the experiment.
DIGESTS = {
    ("plan", "cpu"): "f0bf52eafd31ee66",
    ("plan", "cuda"): "1703a533e607c0fc",
    ("extension", "cpu"): "d26fab31b8a9baab",
    ("extension", "cuda"): "24a126470cc693dd",
    ("python", "cpu"): "a3cf6d494d31ac0f",
    ("python", "cuda"): "05009046d386ca5e",
}


def test_every_name_has_a_row_and_every_row_a_name() -> None:
    assert tuple(FORMATS) == get_args(Format)
    assert all(format.name == name for name, format in FORMATS.items())
    assert SandboxConfig.model_json_schema()["properties"]["format"]["enum"] == list(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_complete(name: Format) -> None:
    format = FORMATS[name]
    assert format.needs.keys() == {"cpu", "cuda"}
    assert format.traits.rule in RULES
    assert format.belongs(format.entry) and format.entry in [path for _, path in format.example]
    assert all(format.belongs(path) for _, path in format.example)
    assert skill_text(name, "cpu") and skill_text(name, "cuda")


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("plan", {"plan.json", "kernels/a.cpp"}),
        ("extension", {"model_new.py", "kernels/a.cpp"}),
        ("python", {"model_new.py"}),
    ],
)
def test_the_files_of_a_solution_are_told_from_the_rest_of_its_folder(name: Format, files: set[str]) -> None:
    assert solution_of(FOLDER, name).files.keys() == files


@pytest.mark.parametrize(("format", "device"), DIGESTS)
def test_skill_texts_stay_as_policies_know_them(format: Format, device: str) -> None:
    text = skill_text(format, device)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[format, device]
