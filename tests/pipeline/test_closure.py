"""The code version of a stage follows every file that it can come to run, and no other."""

import sys

import pytest

from cuda_agent.pipeline import closure
from cuda_agent.pipeline.graph import STAGES


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of its own, and the version of its stage."""
    name = f"pack_{tmp_path.name.replace('-', '_')}"
    root = tmp_path / name
    files = {
        "__init__.py": "",
        "stage.py": f"import json\nfrom {name}.near import thing\n\ndef run(ctx):\n    import {name}.room.lazy\n",
        "near.py": "from . import far\nthing = 1\n",
        "far.py": "",
        "unrelated.py": "",
        "room/__init__.py": "",
        "room/lazy.py": f"PROGRAM = '{name}.room.worker'\n",
        "room/worker.py": "",
        "room/other.py": "",
        "room/skill.md": "be quick",
        "room/other.css": "p {}",
        "room/deep/kernel.cpp": "int x;",
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))

    def version():
        for cached in (closure._root, closure._imports, closure._file_digest):
            cached.cache_clear()
        return closure.code_version(f"{name}.stage")

    yield root, version
    assert name not in sys.modules, "nothing is imported"


@pytest.mark.parametrize(
    "path",
    [
        "stage.py",
        "near.py",
        "far.py",
        "__init__.py",
        "room/__init__.py",
        "room/lazy.py",
        "room/worker.py",
        "room/skill.md",
        "room/deep/kernel.cpp",
    ],
)
def test_a_change_of_anything_it_uses_is_another_version(package, path):
    root, version = package
    before = version()
    assert version() == before
    (root / path).write_text((root / path).read_text() + "\n")
    assert version() != before


@pytest.mark.parametrize("path", ["unrelated.py", "room/other.py", "room/other.css"])
def test_a_change_of_what_it_does_not_use_changes_nothing(package, path):
    root, version = package
    before = version()
    (root / path).write_text("x = 1\n")
    assert version() == before


def test_a_module_that_is_not_there_is_said_to_be_missing(package):
    root, _ = package
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        closure.code_version(f"{root.name}.nowhere")


def test_stages_of_the_graph_depend_on_their_rooms_and_on_no_other():
    synthesis = closure.closure_modules("cuda_agent.stages.synthesis")
    assert "cuda_agent.sandbox.judge.judge" in synthesis, "started by name, by the client"
    assert not any(name.startswith(("cuda_agent.training", "cuda_agent.pipeline")) for name in synthesis)


def test_every_stage_has_a_version():
    versions = {stage.name: closure.code_version(stage.module) for stage in STAGES}
    assert len({versions[name] for name in versions if name.startswith("evaluate")}) == 1


def test_an_image_digest_stands_for_the_environment(monkeypatch):
    closure.environment_digest.cache_clear()
    monkeypatch.setenv("CUDA_AGENT_IMAGE_DIGEST", "sha256:abc")
    assert closure.environment_digest() == "sha256:abc"
    closure.environment_digest.cache_clear()
    monkeypatch.delenv("CUDA_AGENT_IMAGE_DIGEST")
    assert len(closure.environment_digest()) == 64
