"""What the judge calls an attack, and that none harms what comes after it.  The attacks themselves: ``exploits``."""

import ctypes
from pathlib import Path

from tests.sandbox.conftest import KERNEL, Running, plan_solution, task


def test_a_thread_bomb_ends_the_worker_only(running: Running) -> None:
    bomb = """#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
static void* wait(void*) { for (;;) pause(); }
"""
    bomb += KERNEL.replace("long low", "pthread_t t; while (!pthread_create(&t, 0, wait, 0)); abort(); long low")
    verdict = running.evaluate(task(), plan_solution(bomb))
    assert verdict.status == "crash", "it got as many threads as it wanted, or was not stopped while it asked for them"
    refused_by_the_kernel, killed_by_the_watchdog = "SIGABRT", "started more than 64 threads"
    assert refused_by_the_kernel in verdict.message or killed_by_the_watchdog in verdict.message
    assert running.evaluate(task(), plan_solution()).status == "ok"


def test_an_earlier_output_given_again_is_a_cheat(running: Running) -> None:
    replay = KERNEL.replace(
        "long low", "static float* first = 0; if (first) { if (!block) memcpy(y, first, n * 4); return; } long low"
    ).replace(
        "(float)scale;", "(float)scale; if (block == grid - 1) { first = new float[n]; memcpy(first, y, n * 4); }"
    )
    plan = {
        "nodes": [{"kernel": "kernels/chain.cpp", "function": "chain", "args": ["in0", "out0", "in0.numel", "init0"]}]
    }
    verdict = running.evaluate(task(), plan_solution("#include <cstring>\n" + replay, plan))
    assert verdict.status == "cheat"
    assert "outputs of an earlier call" in verdict.message


def test_a_shortcut_in_timed_calls_is_audited(timed: Running) -> None:
    """Right in the five checks, empty afterwards."""
    kernel = KERNEL.replace(
        "long low", "static int calls = 0; if (block == 0) calls++; if (calls > 5) return; long low"
    )
    plan = {
        "nodes": [{"kernel": "kernels/chain.cpp", "function": "chain", "args": ["in0", "out0", "in0.numel", "init0"]}]
    }
    verdict = timed.evaluate(task(), plan_solution(kernel, plan))
    assert verdict.status == "cheat"
    assert "audit" in verdict.message
    assert verdict.reward == -1


def test_the_judge_cannot_be_read_by_its_user(running: Running) -> None:
    running.evaluate(task(), plan_solution())
    judge = running.sandbox._judges[0]._process
    assert judge is not None
    libc = ctypes.CDLL(None)
    assert libc.prctl(3, 0, 0, 0, 0) == 1  # PR_GET_DUMPABLE of the tests: they are
    owner = Path(f"/proc/{judge.pid}/environ").stat().st_uid
    assert owner == 0  # files of a process that is not dumpable belong to root
