"""Finds this machine's compilers (g++, NVRTC, nvcc). Each result has a text ``identity`` that identifies the
compiler's version. The text is a part of the cache key of each build."""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cuda_agent.machine import processor
from cuda_agent.sandbox.build import nvrtc

FLAGS = ("-O3", "-march=native", "-ffast-math", "-std=c++17", "-fPIC", "-pthread", "-fopenmp-simd")
NVRTC_PROGRAM = Path(nvrtc.__file__)  # runs in the jail, as a program that imports nothing of the package


class CompilerMissing(RuntimeError):
    """A compiler, or an NVIDIA library that a build links, is not installed."""


@dataclass(frozen=True)
class Toolchain:
    compiler: str
    identity: str
    includes: str = ""  # folder of the precompiled headers for a full build
    lean: str = ""  # folder of the precompiled headers for a fast build (see ``builder``)


def find_toolchain() -> Toolchain:
    """Returns the C++ compiler of this machine. Leaves the fields for precompiled headers (``includes`` and ``lean``)
    empty. Raises ``CompilerMissing`` if there is no g++."""
    path = shutil.which("g++")
    if path is None:
        raise CompilerMissing("no C++ compiler: 'g++' is not on PATH")
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    return Toolchain(path, f"{version}|{processor()}|{' '.join(FLAGS)}")


@dataclass(frozen=True)
class Nvrtc:
    library: str
    includes: list[str]  # folders of CUDA's headers
    identity: str


@functools.cache
def find_nvrtc() -> Nvrtc:
    """Returns the newest NVRTC in NVIDIA's pip packages, or else the one in ``/usr/local/cuda``. Raises
    ``CompilerMissing`` if NVRTC is not installed."""
    library, includes = nvrtc_files()
    digest = hashlib.sha256(NVRTC_PROGRAM.read_bytes()).hexdigest()[:8]
    version = f"{Path(library).name}, {Path(library).resolve().stat().st_size} bytes, {digest}"
    return Nvrtc(library, includes, version)


def nvrtc_files() -> tuple[str, list[str]]:
    """Returns the path of the NVRTC library, and the folders of CUDA's headers. The library is the newest one in
    NVIDIA's pip packages, or else the one in ``/usr/local/cuda``. Raises ``CompilerMissing`` if NVRTC is not
    installed."""
    packages = _packages()
    homes = [home for place in packages for home in _newest_first(place.glob("cu[0-9]*"))]
    homes += [place / "cuda_nvrtc" for place in packages] + [Path("/usr/local/cuda")]
    for home in homes:
        for library in _newest_first(home.glob("lib*/libnvrtc.so.*")):
            includes = [home / "include", *(p / "cuda_runtime" / "include" for p in packages)]
            return str(library), [str(folder) for folder in includes if folder.is_dir()]
    raise CompilerMissing("no CUDA compiler: libnvrtc is neither in the installed packages nor in /usr/local/cuda")


@dataclass(frozen=True)
class Nvcc:
    compiler: str
    includes: list[str]
    places: list[str]  # folders of the runtime's libraries, if nvcc does not know them
    identity: str

    def libraries(self, name: str) -> list[str]:
        """Finds the NVIDIA library ``name``, such as ``cublas``. Returns its path as a list of one item. Raises
        ``CompilerMissing`` if the library is not installed."""
        places = [*_packages(), Path("/usr/local/cuda/lib64"), Path("/usr/lib/x86_64-linux-gnu")]
        found = [path for place in places for path in sorted(place.glob(f"**/lib{name}.so*"))]
        if not found:
            raise CompilerMissing(f"lib{name} is not installed")
        return [str(found[0])]


@functools.cache
def find_nvcc() -> Nvcc:
    """Returns the nvcc on PATH, or else the one in CUDA_HOME, or else the one in NVIDIA's pip packages. Raises
    ``CompilerMissing`` if nvcc is not installed."""
    homes = [home for place in _packages() for home in _newest_first(place.glob("cu[0-9]*"))]
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    compilers = [shutil.which("nvcc"), f"{toolkit}/bin/nvcc", *(str(home / "bin" / "nvcc") for home in homes)]
    for compiler in compilers:
        if compiler and os.access(compiler, os.X_OK):
            said = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.splitlines()
            includes = [place / "cudnn" / "include" for place in _packages()]
            places = []
            if compiler.startswith(tuple(map(str, _packages()))):
                includes += [home / "include" for home in homes]
                places = [str(home / "lib") for home in homes]
            return Nvcc(compiler, [str(f) for f in includes if f.is_dir()], places, " ".join(said[-2:]))
    raise CompilerMissing("no nvcc: neither on PATH, nor in CUDA_HOME (/usr/local/cuda), nor in the installed packages")


def identities(device: str) -> list[str]:
    """Returns the identities of the compilers that solutions for ``device`` may use, as far as they are installed."""
    found = []
    for find in (find_toolchain, *((find_nvrtc, find_nvcc) if device == "cuda" else ())):
        with contextlib.suppress(CompilerMissing):
            found.append(find().identity)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found.append(f"triton {importlib.metadata.version('triton')}")
    return found


def _packages() -> list[Path]:
    """Returns the folders into which pip installs NVIDIA's packages."""
    found = importlib.util.find_spec("nvidia")
    return [Path(place) for place in found.submodule_search_locations or []] if found else []


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    """Returns ``paths``, such as ``cu9`` and ``cu13``, sorted by the version numbers in their names, the highest
    first."""
    return sorted(paths, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)], reverse=True)
