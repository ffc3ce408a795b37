"""Compilers that were started ahead: what they build, what they cannot, and what is left of them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.sandbox.build import builder as build
from cuda_agent.sandbox.build import toolchain
from cuda_agent.sandbox.build.compiler import Compiler, Waiting
from cuda_agent.sandbox.jail import jail
from cuda_agent.sandbox.jail.scratch import make_folder
from tests.sandbox.conftest import KERNEL, Running, plan_solution, task
from tests.sandbox.drill import _descendants
from tests.waiting import wait_for

PLAIN = 'extern "C" int thrice(int x) { return 3 * std::max(x, x); }'
WITH_LIBRARY = (
    'extern "C" long count(long n) { static std::vector<long>* v; v = new std::vector<long>(n); return v->size(); }'
)
SPECIAL = 'extern "C" double special(double x) { return std::beta(x, x); }'


@pytest.fixture
def builder(tmp_path: Path) -> Iterator[build.Builder]:
    builder = build.Builder(tmp_path / "builds", make_folder("build"), tmp_path / "lease", 20, 2048)
    yield builder
    builder.close()


@pytest.mark.parametrize("pidfd", [True, False])
def test_no_process_of_an_ended_compiler_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pidfd: bool) -> None:
    """``pidfd_open`` is missing on some kernels."""
    if not pidfd:

        def missing(pid: int) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(os, "pidfd_open", missing)
    work = make_folder("compiler")
    policy = jail.JailPolicy(write=(str(work),), execute=jail.SYSTEM_EXECUTE, own_user=False)
    compiler = Compiler(policy, ["/bin/sh", "-c", "sleep 60 & echo $! > child; exit 3"], work)
    assert compiler.finish(20) == (3, "")
    child = int((work / "child").read_text())
    wait_for("the child's end", 10, lambda: not Path(f"/proc/{child}").exists())


def built(builder: build.Builder, source: str, **more: str) -> Path:
    return asyncio.run(builder.library({"k.cpp": source, **more}, ["k.cpp"]))


def in_library(path: Path, expression: str) -> str:
    """The value of ``expression`` over the loaded ``library``, in a process of its own: what is built with -ffast-math
    changes the arithmetic of whoever loads it."""
    code = f"import ctypes; library = ctypes.CDLL({str(path)!r}); print({expression})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def waiting(builder: build.Builder) -> Waiting:
    """The compiler that serves the next build."""
    assert builder._ahead and builder._ahead._next
    return builder._ahead._next.result(30)


def test_a_build_is_done_by_the_compiler_that_waited_for_it(builder: build.Builder) -> None:
    built(builder, "int first;")
    chosen = waiting(builder)
    assert chosen.alive
    assert in_library(built(builder, PLAIN), "library.thrice(14)") == "42"
    assert not chosen.alive and not chosen.work.exists()
    assert waiting(builder) is not chosen


@pytest.mark.parametrize("source", ["#include <vector>\n" + WITH_LIBRARY, SPECIAL], ids=["C++ library", "beta"])
def test_what_the_fast_way_lacks_is_built_in_full(builder: build.Builder, source: str) -> None:
    assert in_library(built(builder, source), "'loaded'") == "loaded"


def test_headers_of_the_solution_are_found(builder: build.Builder) -> None:
    library = built(builder, '#include "more/n.h"\nextern "C" int n() { return N; }', **{"more/n.h": "#define N 7\n"})
    assert in_library(library, "library.n()") == "7"


@pytest.mark.parametrize("name", ["@source", "@main.cpp"])
def test_the_name_of_the_pipe_leads_nowhere(builder: build.Builder, name: str) -> None:
    with pytest.raises(build.BuildError, match="No such file"):
        built(builder, f'#include "{name}"\n')


def test_a_compiler_that_died_waiting_costs_nothing(builder: build.Builder) -> None:
    built(builder, "int first;")
    os.killpg(waiting(builder)._process.pid, signal.SIGKILL)
    assert built(builder, PLAIN).exists()


def test_both_ways_flush_denormals_alike(
    builder: build.Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library of fast mathematics sets the processor's mode when it is loaded; without that kernels are slower.
    Whether a shared library does so depends on the compiler (GCC does up to 12), so the compiler itself is asked."""
    denormal = "float('2.3e-308') / 4.0"  # below the smallest normal double
    (tmp_path / "k.cpp").write_text("int x;")
    subprocess.run(["g++", *toolchain.FLAGS, "-shared", "k.cpp", "-o", "k.so"], cwd=tmp_path, check=True)
    expected = in_library(tmp_path / "k.so", denormal)
    assert expected in ("0.0", "5.75e-309")
    fast = in_library(built(builder, PLAIN), denormal)
    builder._folder = builder._folder / "full"
    monkeypatch.setattr(builder, "_ahead", None)
    full = in_library(built(builder, PLAIN), denormal)
    assert (fast, full) == (expected, expected)


def test_nothing_is_left_of_a_compiler_nobody_needed(builder: build.Builder) -> None:
    built(builder, "int first;")
    work, pid = waiting(builder).work, waiting(builder)._process.pid
    builder.close()
    assert not work.exists() and pid not in _descendants(os.getpid())


def test_who_is_refused_does_not_wait_for_the_baselines(start: Callable[..., Running]) -> None:
    running = start(clock="real", memory_mb=400)
    verdict = running.evaluate(task(), plan_solution(KERNEL.replace("0.0f)", "0.0f) + 0.5f")))
    assert (verdict.status, verdict.eager_seconds, verdict.compile_seconds) == ("wrong", None, None)
    assert not (running.sandbox.cache / "baselines").exists()


def test_one_who_waits_for_a_build_whose_caller_was_cancelled_builds_it(
    builder: build.Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no error of the source, and is not kept."""
    started: list[str] = []

    async def compile_one(order: Any) -> None:
        started.append("build")
        if len(started) == 1:
            await asyncio.sleep(60)
        order.target.mkdir(parents=True)

    async def both() -> Path:
        await builder.toolchain()
        monkeypatch.setattr(builder, "_compile", compile_one)
        source = {"a.cpp": "int a;", "b.cpp": "int b;"}
        first, second = (asyncio.ensure_future(builder.library(source, [*source])) for _ in range(2))
        while not started:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        first.cancel()
        return await second

    asyncio.run(both())
    assert started == ["build", "build"]
