"""The code version of a stage follows every file that it can come to run, and no other."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_agent.pipeline import closure
from cuda_agent.pipeline.graph import STAGES
from cuda_agent.sandbox import verdict_key

PACKAGE = Path(closure.__file__).parents[1]
JUDGING = {stage.name for stage in STAGES if "sandbox" in stage.config and stage.name != "report"}
ROOMS_OF_A_VERDICT = ("judge", "worker", "jail", "build", "formats")
NO_PART_OF_A_VERDICT = {"formats/schema.py"}  # what `sandbox schema` prints; no judge, worker or builder imports it


def forget():
    for cached in (closure._imports, closure._file_digest, closure._source, closure._data_files):
        cached.cache_clear()


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
        forget()
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


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy of the package that a test may change."""
    folder = tmp_path_factory.mktemp("copied") / "cuda_agent"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def changed_by(copied, monkeypatch):
    """The stages whose code version another line in this file of the package changes."""
    monkeypatch.setattr(closure, "_root", lambda top: copied)
    closure._source.cache_clear()

    def versions(names):
        closure._file_digest.cache_clear()
        return {stage.name: closure.code_version(stage.module) for stage in STAGES if not names or stage.name in names}

    def changed(path, names=()):
        before, text = versions(names), (copied / path).read_bytes()
        (copied / path).write_bytes(text + b"\n")
        try:
            after = versions(names)
        finally:
            (copied / path).write_bytes(text)
        return {name for name in after if after[name] != before[name]}

    yield changed
    closure._source.cache_clear()


def files_of_a_verdict():
    files = [file for room in ROOMS_OF_A_VERDICT for file in (PACKAGE / "sandbox" / room).rglob("*") if file.is_file()]
    names = [file.relative_to(PACKAGE / "sandbox").as_posix() for file in files if "__pycache__" not in file.parts]
    return [name for name in names if name not in NO_PART_OF_A_VERDICT]


def test_all_that_judges_is_in_the_closure_of_every_stage_that_judges():
    files = files_of_a_verdict()
    wanted = {"judge/memory/check.py", "judge/memory/check.cu", "judge/memory/host.py", "judge/memory/device.py",
              "build/nvrtc.py", "worker/runtime.cpp", "formats/binding_registry.h",
              "formats/torch_surface.h", "formats/stand_ins/types.h"}  # fmt: skip
    assert wanted <= set(files) and len(files) > 40
    assert {"synthesis", "bootstrap", "warmup", "collect", "agentic", "evaluate-base"} <= JUDGING
    for stage in STAGES:
        if stage.name in JUDGING:
            closed = closure.closure_files(stage.module)
            assert not [name for name in files if f"cuda_agent/sandbox/{name}" not in closed], stage.name


@pytest.mark.nightly
def test_another_comparison_is_another_version_of_the_stages_that_judge_alone(changed_by):
    assert changed_by("sandbox/judge/memory/check.py") == JUDGING
    assert changed_by("sandbox/judge/memory/check.cu") == JUDGING


@pytest.mark.parametrize(
    "file",
    [
        "judge/memory/check.py",
        "judge/memory/check.cu",
        "worker/runtime.cpp",
        "build/compiler.py",
        "wire.py",
        "../lease.py",
        "../syntax.py",
    ],
)
def test_a_kept_verdict_is_none_of_other_code_that_judges(copied, file):
    program = "from cuda_agent.sandbox import verdict_key as key; print(key.__file__, key.code_version())"

    def version():
        run = [sys.executable, "-P", "-c", program]
        said = subprocess.run(run, env={"PYTHONPATH": str(copied.parent)}, capture_output=True, text=True, check=True)
        where, version = said.stdout.split()
        assert where.startswith(str(copied))
        return version

    before, path = version(), copied / "sandbox" / file
    assert version() == before
    text = path.read_bytes()
    path.write_bytes(text + b"\n")
    try:
        assert version() != before
    finally:
        path.write_bytes(text)


def test_engines_and_ray_are_no_part_of_supervised_training(changed_by):
    files = [*PACKAGE.glob("policy/engines/vllm*.py"), *PACKAGE.glob("rl/ray/*.py")]
    assert len(files) > 6
    for file in files:
        changed = changed_by(file.relative_to(PACKAGE).as_posix(), {"rft", "critic", "agentic"})
        assert not changed & {"rft", "critic"}, file
        assert file.name == "__init__.py" or "agentic" in changed, f"{file}: the test would see a change"


@pytest.mark.parametrize("name", ["rft", "critic"])
def test_supervised_training_runs_again_for_little_code(name):
    modules = closure.closure_modules(f"cuda_agent.stages.{name}")
    assert "cuda_agent.training.trainer" in modules
    assert len(modules) <= 31, sorted(modules)
    foreign = ("sandbox", "agent", "synthesis", "tasks", "policy.engines", "rl.ray", "pipeline")
    assert not [module for module in modules if module.removeprefix("cuda_agent.").startswith(foreign)]


def test_an_image_digest_stands_for_the_environment(monkeypatch):
    closure.environment_digest.cache_clear()
    monkeypatch.setenv("CUDA_AGENT_IMAGE_DIGEST", "sha256:abc")
    assert closure.environment_digest() == "sha256:abc"
    closure.environment_digest.cache_clear()
    monkeypatch.delenv("CUDA_AGENT_IMAGE_DIGEST")
    assert len(closure.environment_digest()) == 64


def test_the_key_of_a_kept_verdict_holds_all_modules_of_judge_and_worker():
    settings = {"config.py", "errors.py"}  # the key holds the settings' values; messages of errors change no verdict
    entries = ("judge.judge", "worker.main")
    files = set().union(*(closure.closure_files(f"cuda_agent.sandbox.{name}").values() for name in entries))
    left = {str(file.relative_to(PACKAGE)) for file in files - set(verdict_key.files())}
    assert {name for name in left if not name.endswith("__init__.py")} <= settings | {"tasks/task.py"}
