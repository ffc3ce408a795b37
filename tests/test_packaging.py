"""The wheel: it holds configuration, templates and styles, and runs from an empty environment."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCK = [line.split("#")[0].strip() for line in (ROOT / "requirements.lock").read_text().splitlines()]
PINS = dict(re.match(r"([\w.-]+)==([\w.!+]+)", line).groups() for line in LOCK if line)  # type: ignore[union-attr]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive, built without a network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.nightly
def test_the_wheel_holds_every_data_file_of_the_package(built):
    names = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert f"cuda_agent/conf/{path.relative_to(ROOT / 'conf').as_posix()}" in names
    own = [path for path in (ROOT / "cuda_agent").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert not {path.relative_to(ROOT).as_posix() for path in own} - names
    assert {path.suffix for path in own} - {".py"}, "templates, styles and skill text are data files"


@pytest.mark.nightly
def test_the_source_archive_holds_no_environment_and_no_runs(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = archive.getnames()
    assert not [name for name in names if "/.venv/" in name or "/.cuda-agent/" in name]
    assert len(names) < 1000


@pytest.mark.nightly
def test_the_wheel_runs_from_an_empty_environment(built, tmp_path):
    """Only the project itself is installed there; what it needs comes from this environment's site-packages."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, str(next(built.glob("*.whl")))], check=True)
    site = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    own = next(environment.glob("lib/python*/site-packages"))
    (own / "zz-dependencies.pth").write_text(f"{site}\n")  # a plain path: the editable install's own .pth is not read

    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

    def command(*arguments: str) -> str:
        program = environment / "bin" / "cuda-agent"
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, cwd=tmp_path, env=clean, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "Teach a language model" in command("--help")
    assert "sha256" in command("config", "experiment=paper")
    program = [python, "-c", "import cuda_agent; print(cuda_agent.__file__)"]
    where = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env=clean)
    assert str(environment) in where.stdout


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *project["dependency-groups"]["dev"],
        *project["build-system"]["requires"],
    ]
    pinned = {canonical(name) for name in PINS}
    assert not {canonical(re.match(r"[\w.-]+", line).group()) for line in wanted} - pinned


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_lock_is_complete_and_consistent(python):
    """Every installed package's own requirements, extras aside, are met by the lock."""
    from importlib.metadata import PackageNotFoundError, distribution

    from packaging.markers import default_environment
    from packaging.requirements import Requirement

    pinned = {canonical(name): version for name, version in PINS.items()}
    environment = default_environment() | {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    for name in PINS:
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:  # the GPU libraries may be left out
            assert any(line.startswith(f"{name}==") and ";" in line for line in LOCK), f"{name} is not installed"
            continue
        for line in requires:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate(environment):
                assert canonical(needed.name) in pinned, f"{name} needs {line}"
                assert needed.specifier.contains(pinned[canonical(needed.name)], prereleases=True), (
                    f"{name} needs {line}"
                )


@pytest.mark.parametrize(("name", "more"), [("environment", set()), ("mlflow", {"psycopg2-binary"}), ("ray", None)])
def test_an_images_lock_has_the_versions_of_the_lock_and_hashes(name, more):
    """``more`` are the packages that the project itself does not need; None: not compared."""
    text = (ROOT / "images" / f"{name}.lock").read_text()
    found = {}
    for entry in text.replace(" \\\n", "").splitlines():
        known = re.fullmatch(r"([\w.-]+)==([\w.!+]+)(?: +--hash=sha256:[0-9a-f]{64})+", entry)
        package, version = known.groups()  # type: ignore[union-attr]
        found[canonical(package)] = version
    pinned = {canonical(package): version for package, version in PINS.items()}
    assert {package: found[package] for package in found.keys() & pinned.keys()}.items() <= pinned.items()
    if more is not None:
        assert found.keys() - pinned.keys() == more
    if name == "environment":
        assert found.keys() == pinned.keys()


def test_the_lock_names_no_host_and_no_path():
    for line in filter(None, LOCK):
        assert re.fullmatch(r'[\w.-]+==[\w.!+]+( ; sys_platform == "linux")?', line), line
    for name in ("requirements.lock", "Makefile", ".ci/run", "pyproject.toml"):
        assert not re.search(r"https?://|--index|find-links", (ROOT / name).read_text()), name
