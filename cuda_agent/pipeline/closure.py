"""Computes three parts of a stage's cache key: code version, digest of the software environment, and device name.

The code version is a hash over the stage's import closure.  The closure holds these files:

- the stage's module;
- the modules that it imports, directly or through other modules, at the top of a file or inside a function;
- the modules whose full name is a string in one of these modules, such as ``"cuda_agent.sandbox.judge.judge"``;
- the data files, such as templates and C++ sources, in the folders of these modules and below.  A data file beside a
  module of the same name, such as ``check.cu`` beside ``check.py``, counts only if that module is in the closure.

The closure holds only modules of ``cuda_agent`` and of the stage's top-level package.  A module directly in the folder
of a top-level package adds no data files.

The search reads syntax trees and imports nothing.  It does not find a module whose name the code builds at run time."""

import ast
import functools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from cuda_agent.machine import processor_facts
from cuda_agent.storage import file_sha256, json_sha256

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "pyarrow")
_NO_DATA = (".py", ".pyc", ".pyi")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def code_version(module: str) -> str:
    """Returns a sha256 of the import closure of ``module``, over the names and bytes of all its files."""
    return json_sha256(code_digests(module))


def code_digests(module: str) -> dict[str, str]:
    """Returns name -> sha256 for all files in the import closure of ``module`` (see ``closure_files``)."""
    return {name: _file_digest(path) for name, path in closure_files(module).items()}


def closure_files(module: str) -> dict[str, Path]:
    """Returns name -> path for all files in the import closure of ``module``.  The closure consists of ``module``, the
    modules that it may import, directly or not, and their data files.  A name looks like ``cuda_agent/storage.py``."""
    files: dict[str, Path] = {}
    for name in closure_modules(module):
        root, path = _root(name.split(".")[0]), _source(name)
        assert path is not None
        files[path.relative_to(root.parent).as_posix()] = path
        if path.parent == root:
            continue
        for data, module_file in _data_files(path.parent):  # they belong to every module in the folder
            if module_file in (None, path):
                files[data.relative_to(root.parent).as_posix()] = data
    return files


@functools.cache
def _data_files(folder: Path) -> list[tuple[Path, Path | None]]:
    """Returns the data files in ``folder`` and below, each with the module of the same name beside it, if there is
    one."""
    found = (path for path in folder.rglob("*") if path.suffix not in _NO_DATA and "__pycache__" not in path.parts)
    modules = ((path, path.with_suffix(".py")) for path in found if path.is_file())
    return [(path, module if module.exists() else None) for path, module in modules]


def closure_modules(module: str) -> set[str]:
    """Returns the names of ``module`` and of all modules that it may import, directly or not.  Includes only modules of
    ``cuda_agent`` and of the top-level package of ``module``."""
    tops = {module.split(".")[0], "cuda_agent"}
    seen: set[str] = set()
    front = [module]
    while front:
        name = front.pop()
        if name in seen or (path := _source(name)) is None:
            continue
        seen.add(name)
        parents = [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]
        front += [other for other in [*parents, *_imports(path, name)] if other.split(".")[0] in tops]
    if module not in seen:
        raise ModuleNotFoundError(f"no source of {module}")
    return seen


@functools.cache
def environment_digest() -> str:
    """Returns a string that identifies the software environment.  It is the value of the environment variable
    CUDA_AGENT_IMAGE_DIGEST, if set.  Otherwise it is a hash of the machine type, the operating system, and the versions
    of Python and of the packages in ``PACKAGES``."""
    return os.environ.get("CUDA_AGENT_IMAGE_DIGEST") or json_sha256(environment_versions())


def environment_versions() -> dict[str, str]:
    """Returns the machine type, the operating system, and the versions of Python and of ``PACKAGES``, by name."""
    here = {"python": platform.python_version(), "machine": platform.machine(), "system": sys.platform}
    return here | {package: version(package) for package in PACKAGES}


@functools.cache
def device_name(device: str) -> str:
    """Returns a description of this machine's ``device``.  For "cpu" it consists of the processor, the number of cores
    and the version of g++.  For "cuda" it consists of the GPU and the driver's version."""
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return _first_line_of(query) or "no GPU"
    model = processor_facts().get("model name") or platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores, {_first_line_of(['g++', '--version']) or 'no g++'}"


def _first_line_of(command: list[str]) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return said.partition("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@functools.cache
def _root(top: str) -> Path:
    spec = find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no package {top}")
    return Path(spec.submodule_search_locations[0])


@functools.cache
def _source(module: str) -> Path | None:
    top, *rest = module.split(".")
    path = _root(top).joinpath(*rest)
    candidates = (path / "__init__.py", path.with_name(path.name + ".py"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


@functools.cache
def _imports(path: Path, module: str) -> tuple[str, ...]:
    return tuple(_imported(ast.parse(path.read_bytes()), module, path.name == "__init__.py"))


def _imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Yields the full names that ``module`` imports, and the strings in its source that may be a module's name because
    they look like ``a.b``.  ``tree`` is the syntax tree of the source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                depth = node.level - 1 if is_package else node.level
                package = module.split(".")[: len(module.split(".")) - depth]
                base = ".".join([*package, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            yield node.value


_file_digest = functools.cache(file_sha256)
