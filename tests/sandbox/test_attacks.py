"""Attacks from inside a candidate's kernel: none gets through, and none harms what comes after it."""

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.conftest import KERNEL, Running, plan_solution, task

PRELUDE = """
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
static bool readable(const char* path) {
  char c;
  int f = open(path, O_RDONLY);
  return f >= 0 && read(f, &c, 1) == 1;
}
static bool parents(const char* what) {
  char path[64] = "/proc/";
  int pid = getppid(), digits = 0;
  char text[16];
  while (pid) { text[digits++] = '0' + pid % 10; pid /= 10; }
  for (int i = 0; i < digits; i++) path[6 + i] = text[digits - 1 - i];
  strcat(path, what);
  return open(path, O_RDONLY) >= 0;
}
"""

ATTACKS = {
    "environment": 'return getenv("SANDBOX_CANARY") != nullptr;',
    "parents_environment": 'return parents("/environ");',
    "parents_memory": 'return parents("/mem");',
    "other_folder": 'return readable("CANARY_FILE");',
    "system_file": 'return readable("/etc/passwd");',
    "temporary_file": 'return open("/tmp/left-by-a-candidate", O_CREAT | O_RDWR, 0600) >= 0;',
    "shared_memory_file": 'return open("/dev/shm/left-by-a-candidate", O_CREAT | O_RDWR, 0600) >= 0;',
    "network": "return socket(AF_INET, SOCK_STREAM, 0) >= 0;",
    "unix_socket": "return socket(AF_UNIX, SOCK_STREAM, 0) >= 0;",
    "fork": "pid_t p = fork(); if (p == 0) _exit(0); return p > 0;",
    "exec": 'execl("/nonexistent", "x", (char*)0); return errno == ENOENT;',
    "signal": "return kill(getppid(), 0) == 0;",
    "traced_parent": "return ptrace(PTRACE_SEIZE, getppid(), 0, 0) == 0;",
    "memory_file": 'return syscall(SYS_memfd_create, "x", 0) >= 0;',
    "namespace": "return syscall(SYS_unshare, 0x10000000) == 0;",
    "io_uring": "char p[120] = {}; return syscall(425, 4, p) >= 0;",
    "outlive_the_parent": "return prctl(PR_SET_PDEATHSIG, 0) == 0;",
}


@pytest.fixture(scope="module", autouse=True)
def canary() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDBOX_CANARY", "secret")
        yield


def source(attack: str, folder: Path) -> str:
    secret = folder / "secret"
    secret.write_text("secret")
    return PRELUDE + "static bool attack() { " + attack.replace("CANARY_FILE", str(secret)) + " }\n"


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_from_a_kernel_fails(running: Running, tmp_path: Path, name: str) -> None:
    """The kernel gives the right answer only if its attack failed."""
    kernel = source(ATTACKS[name], tmp_path) + KERNEL.replace("long low", "if (attack()) return; long low")
    verdict = running.evaluate(task(), plan_solution(kernel))
    assert (verdict.status, verdict.message) == ("ok", "")


def test_the_attacks_work_outside_the_jail(tmp_path: Path) -> None:
    """The control: what the jail stops does happen without it."""
    bodies = "\n".join(
        f"static bool {name}_() {{ {body.replace('CANARY_FILE', str(tmp_path / 'secret'))} }}\n"
        f'extern "C" int attack_{name}() {{ return {name}_(); }}'
        for name, body in ATTACKS.items()
    )
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "attacks.cpp").write_text(PRELUDE + bodies.replace("/tmp/left", f"{tmp_path}/left"))
    library = tmp_path / "attacks.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, tmp_path / "attacks.cpp"], check=True)
    harmless = [
        n for n in ATTACKS if n not in ("traced_parent", "namespace", "io_uring", "shared_memory_file", "signal")
    ]
    call = f"""
import ctypes
library = ctypes.CDLL({str(library)!r})
print([name for name in {harmless!r} if not getattr(library, "attack_" + name)()])
"""
    assert subprocess.run([sys.executable, "-c", call], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_fork_bomb_finds_no_process_to_make(running: Running) -> None:
    bomb = KERNEL.replace("long low", "for (int i = 0; i < 1000; i++) fork(); long low")
    assert running.evaluate(task(), plan_solution("#include <unistd.h>\n" + bomb)).status == "ok"


def test_a_thread_bomb_ends_the_worker_only(running: Running) -> None:
    bomb = """#include <pthread.h>
#include <unistd.h>
static void* wait(void*) { for (;;) pause(); }
"""
    bomb += KERNEL.replace(
        "long low", "pthread_t t; while (!pthread_create(&t, 0, wait, 0)); for (;;) pause(); long low"
    )
    verdict = running.evaluate(task(), plan_solution(bomb))
    assert verdict.status in ("crash", "timeout")
    assert running.evaluate(task(), plan_solution()).status == "ok"


def test_inputs_cannot_be_written_by_any_way(running: Running) -> None:
    verdict = running.evaluate(task(), plan_solution(KERNEL.replace("y[i] =", "((float*)x)[i] = y[i] =")))
    assert verdict.status == "crash" and "a write to an input" in verdict.message
    remap = """#include <sys/mman.h>
static bool opened(const void* p) {
  return !mprotect((void*)((unsigned long)p & ~4095UL), 4096, PROT_READ | PROT_WRITE);
}
"""
    kernel = remap + KERNEL.replace("long low", "if (opened(x)) return; long low")
    assert running.evaluate(task(), plan_solution(kernel)).status == "ok"


def test_only_the_judges_channel_is_open(running: Running) -> None:
    count = """#include <fcntl.h>
static bool more() { int open = 0; for (int f = 3; f < 4096; f++) open += fcntl(f, F_GETFD) >= 0; return open > 1; }
"""
    kernel = count + KERNEL.replace("long low", "if (more()) return; long low")
    assert running.evaluate(task(), plan_solution(kernel)).status == "ok"


def test_outputs_that_are_not_written_do_not_pass(running: Running) -> None:
    assert (
        running.evaluate(task(), plan_solution(KERNEL.replace("y[i] =", "volatile float unused ="))).status == "wrong"
    )


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


def test_a_forged_done_signal_comes_too_early(running: Running) -> None:
    forge = """#include <unistd.h>
static void done() { char frame[8] = {'='}; for (int f = 3; f < 32; f++) (void)!write(f, frame, 8); usleep(50000); }
"""
    kernel = forge + KERNEL.replace("long low", "if (block == 0) done(); long low")
    assert running.evaluate(task(), plan_solution(kernel)).status in ("wrong", "cheat", "crash")


def test_work_left_to_a_thread_is_not_done_in_time(running: Running) -> None:
    later = """#include <pthread.h>
#include <unistd.h>
struct Job { const float* x; float* y; long n; };
static void* run(void* p) {
  Job* j = (Job*)p;
  usleep(20000);
  for (long i = 0; i < j->n; i++) j->y[i] = j->x[i] > 0 ? j->x[i] * 1.5f : 0;
  return 0;
}
void chain(long block, long, const float* x, float* y, long n, double) {
  if (block) return;
  pthread_t t;
  pthread_create(&t, 0, run, new Job{x, y, n});
}
"""
    assert running.evaluate(task(), plan_solution(later)).status in ("wrong", "crash")


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
