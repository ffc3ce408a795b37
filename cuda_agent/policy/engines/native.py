"""Compiles ``step.cpp``, which implements some of the decoder's CPU operations in C++.

The head size and the number of query heads per key-value head are constants of the compiled library. Each process
compiles its library in about a second, and loads it. The library does not stay on disk, so a process never loads an
outdated library or another user's. Without a C++ compiler the decoder uses torch's slower operators."""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).parent / "step.cpp"
# The compiler may reorder and so vectorize sums.  -ffast-math would, at link time, turn off denormals in the process.
FLAGS = "-O3 -march=native -std=c++17 -shared -fPIC -fno-math-errno -fno-trapping-math -fno-signed-zeros"
FLAGS += " -fassociative-math"


@functools.cache
def library(head: int, group: int) -> ctypes.CDLL | None:
    """Returns the functions of ``step.cpp``, compiled for heads of size ``head`` and ``group`` query heads per
    key-value head. Returns None if they cannot be compiled."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return None
    # Use threads only if torch brings GNU's OpenMP under its plain name: the loader then gives us the same copy.
    # Another copy would keep its own threads spinning beside torch's threads.
    threads = ["-fopenmp"] if (Path(torch.__file__).parent / "lib" / "libgomp.so.1").exists() else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.so"
        shape = [f"-DHEAD={head}", f"-DGROUP={group}"]
        command = [compiler, *FLAGS.split(), *shape, str(SOURCE), "-o", str(path), *threads]
        if subprocess.run(command, capture_output=True).returncode:
            return None
        loaded = ctypes.CDLL(str(path))
    pointer, number, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
    loaded.attend.argtypes = [*[pointer] * 6, *[number] * 3, real, ctypes.c_int]
    loaded.place.argtypes = [*[pointer] * 6, *[number] * 3, real, ctypes.c_int]
    loaded.norm.argtypes = [pointer, pointer, number, number, real, ctypes.c_int]
    loaded.gated.argtypes = [pointer, pointer, number, number, ctypes.c_int]
    for function in (loaded.attend, loaded.place, loaded.norm, loaded.gated):
        function.restype = None
    return loaded
