"""Solutions that bring their own compilers: a first pass that may start programs, a second one that finds its fruit."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.lease import Lease
from cuda_agent.sandbox.build import toolchain
from cuda_agent.sandbox.formats import first_pass, first_pass_watchdog
from cuda_agent.sandbox.jail.descendants import descendants, state
from cuda_agent.sandbox.wire import Solution
from cuda_agent.sandbox.worker import same_files
from tests.sandbox.conftest import Running, task

MODEL = """
import ctypes, json, os, socket, subprocess, sys, time
import torch
PREPARE
class ModelNew(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, x):
        FORWARD
"""
HONEST = "return torch.relu(x) * self.scale"
ASKS = "# triton\n"
needs_ninja = pytest.mark.skipif(shutil.which("ninja") is None, reason="load_inline needs ninja")


def solution(prepare: str = "", forward: str = HONEST, **files: str) -> Solution:
    code = MODEL.replace("PREPARE", prepare).replace("FORWARD", forward)
    return Solution("python", {"model_new.py": code, **files})


def kept(running: Running) -> list[Path]:
    """The folders that first passes left, newest last."""
    marks = (running.sandbox.cache / "passes").glob("*/*.done")
    return [mark.with_suffix("") for mark in sorted(marks, key=lambda mark: mark.stat().st_mtime_ns)]


def processes_that_say(word: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line:
            found.append(line)
    return found


def test_a_pass_that_fails_on_a_full_disk_is_no_verdict_and_is_not_kept(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil._ntuple_diskusage(1 << 30, 1 << 30, 1000)
    monkeypatch.setattr(first_pass.shutil, "disk_usage", lambda path: full)
    broken = solution(f"{ASKS}raise RuntimeError('No space left on device')")
    assert running.evaluate(task(), broken).status == "infra"
    monkeypatch.undo()
    assert running.evaluate(task(), broken).status == "build_error"


def test_another_compiler_needs_a_new_pass(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = solution(f"{ASKS}x = 1")
    assert running.evaluate(task(), asks).status == "ok"
    before = len(kept(running))
    monkeypatch.setattr(toolchain, "identities", lambda device: ["another g++"])
    assert running.evaluate(task(), asks, again=True).status == "ok"
    assert len(kept(running)) == before + 1


COMPILED = solution(
    "@torch.compile\ndef chain(x, scale):\n    return torch.relu(x) * scale", "return chain(x, self.scale)"
)


@pytest.mark.nightly  # TorchInductor's own headers take half a minute
def test_torch_compile_works(running: Running) -> None:
    verdict = running.evaluate(task(), COMPILED)
    assert (verdict.status, verdict.message, verdict.checks) == ("ok", "", 5)
    assert (kept(running)[-1] / "inductor").is_dir()
    assert not any(line.startswith("not observed") for line in verdict.advice), verdict.advice


SOURCE = """
SOURCE = 'extern "C" void chain(const float* x, float* y, long n, double s) {' \\
    'for (long i = 0; i < n; i++) y[i] = x[i] > 0 ? x[i] * (float)s : 0; }'
def loaded(path):
    found = ctypes.CDLL(path)
    found.chain.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_double]
    return found
"""
CALL = """y = torch.empty_like(x)
        library().chain(x.data_ptr(), y.data_ptr(), x.numel(), self.scale)
        return y"""
OWN_COMPILER = solution(
    SOURCE
    + """
def library():
    if not os.path.exists("chain.so"):
        open("chain.cpp", "w").write(SOURCE)
        command = ["g++", "-O2", "-shared", "-fPIC", "chain.cpp", "-o", "chain.so"]
        subprocess.run(command, check=True, capture_output=True, text=True)
    return loaded(os.path.abspath("chain.so"))
VERSION = subprocess.check_output(["g++", "--version"])
""",
    CALL,
)


@pytest.mark.nightly
def test_a_solution_that_was_refused_a_program_gets_a_first_pass(running: Running) -> None:
    assert not first_pass.asks(OWN_COMPILER.files["model_new.py"])
    verdict = running.evaluate(task(), OWN_COMPILER)
    assert (verdict.status, verdict.message) == ("ok", "")
    assert (kept(running)[-1] / "chain.so").is_file()


COMMAND = """["g++", "-O2", "-shared", "-fPIC", source, "-o", target]"""
ELSEWHERE = {
    "a new folder": f"""
import pathlib, tempfile
folder = tempfile.mkdtemp(prefix="kernel-")
source, target = folder + "/chain.cpp", folder + "/chain.so"
pathlib.Path(source).write_text(SOURCE)
subprocess.run({COMMAND}, check=True)""",
    "a folder that is removed": f"""
import tempfile
with tempfile.TemporaryDirectory() as folder:
    source, target = os.path.join(folder, "chain.cpp"), os.path.join(folder, "chain.so")
    with open(source, "w") as file:
        file.write(SOURCE)
    subprocess.run({COMMAND}, check=True)
    loaded(target)""",
    "a file that is removed": f"""
import tempfile
with tempfile.NamedTemporaryFile("w", suffix=".cpp") as file:
    file.write(SOURCE)
    file.flush()
    source, target = file.name, file.name + ".so"
    subprocess.check_call({COMMAND})
if os.path.exists(source):
    os.remove(source)""",
    "a fixed folder in /tmp": f"""
os.makedirs("/tmp/kernels", exist_ok=True)
source, target = "/tmp/kernels/chain.cpp", os.path.join('/tmp', "chain.so")
with open(source, "w") as file:
    file.write(SOURCE)
subprocess.run({COMMAND}, check=True)""",
    "sources written at every import": f"""
source, target = os.path.abspath("chain.cpp"), os.path.abspath("chain.so")
with open(source, "w") as file:
    print(SOURCE, file=file)
os.makedirs("more", exist_ok=True)
descriptor = os.open("more/log", os.O_WRONLY | os.O_CREAT)
os.write(descriptor, b"x"); os.close(descriptor)
subprocess.run({COMMAND}, check=True)""",
}


@pytest.mark.nightly
@pytest.mark.parametrize("prepare", ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_solution_may_compile_where_it_wants_and_write_its_sources_each_time(running: Running, prepare: str) -> None:
    code = solution(f"{SOURCE}{prepare}\nfound = loaded(target)", CALL.replace("library()", "found"))
    verdict = running.evaluate(task(), code)
    assert (verdict.status, verdict.message, verdict.checks) == ("ok", "", 5)


def test_what_a_first_pass_left_is_kept_for_the_same_solution_and_task_only(running: Running) -> None:
    before = len(kept(running))
    counting = solution(ASKS + "open('when', 'w').write(str(time.time()))" + "\n" * 3).files["model_new.py"]
    counting = counting.replace(
        "open('when', 'w')", "(open('when', 'w') if os.access('.', os.W_OK) else open('/dev/null', 'w'))"
    )
    one = Solution("python", {"model_new.py": counting})
    assert running.evaluate(task(), one).status == "ok"
    place = kept(running)[-1]
    when = (place / "when").read_text()
    shutil.rmtree(running.sandbox.cache / "verdicts")
    assert running.evaluate(task(), one).status == "ok"
    assert (place / "when").read_text() == when and len(kept(running)) == before + 1
    assert running.evaluate(task(task().code.replace("1.5", "2.5"), "other"), one).status == "ok"
    assert len(kept(running)) == before + 2
    mine = [entry.stat() for entry in place.rglob("*")]
    assert all(s.st_uid == os.getuid() and not s.st_mode & 0o022 for s in mine)


BROKEN = """
from torch.utils.cpp_extension import load_inline
load_inline("broken", "#error this is no program", functions=None, no_implicit_headers=True)
"""


@needs_ninja
def test_what_the_compiler_says_reaches_the_author(running: Running) -> None:
    verdict = running.evaluate(task(), solution(BROKEN))
    assert verdict.status == "build_error"
    assert "main.cpp:1:2: error: #error this is no program" in verdict.message
    assert str(running.sandbox.cache) not in verdict.message


@pytest.mark.parametrize(
    ("prepare", "forward", "status", "said"),
    [
        ("raise ValueError('not today')", HONEST, "build_error", "ValueError: not today (model_new.py line"),
        ("", "return x.no_such_thing()", "build_error", "no_such_thing"),
        ("os._exit(3)", HONEST, "crash", "while it compiled, ended itself (exit 3)"),
        ("os.kill(os.getpid(), 11)", HONEST, "crash", "SIGSEGV"),
        ("while True: pass", HONEST, "timeout", "did not finish in time"),
        ("keep = bytearray(450 << 20)\ntime.sleep(5)", HONEST, "crash", "used more than 300 MB"),
        ("subprocess.run([sys.executable, '-c', 'b = bytearray(450 << 20); import time; time.sleep(5)'])", HONEST,
         "crash", "used more than 300 MB"),
        ("for i in range(6000): open(f'file{i}', 'w').close()\ntime.sleep(2)", HONEST, "crash", "wrote too many"),
        ("for i in range(3): open(f'hole{i}', 'wb').truncate(250 << 20)\ntime.sleep(2)", HONEST, "crash", "too large"),
        ("for i in range(200): os.mkdir('d'); os.chdir('d')\ntime.sleep(2)", HONEST, "crash", "wrote too many"),
        ("for i in range(80): subprocess.Popen(['sleep', '30'])\ntime.sleep(2)", HONEST, "crash", "processes"),
    ],
)  # fmt: skip
def test_a_first_pass_that_fails_costs_its_solution_only(
    running: Running, monkeypatch: pytest.MonkeyPatch, prepare: str, forward: str, status: str, said: str
) -> None:
    monkeypatch.setattr(running.sandbox._first_pass, "_seconds", 2.0 if status == "timeout" else 20.0)
    monkeypatch.setattr(running.sandbox._first_pass, "_memory_mb", 1000 if said == "processes" else 300)
    before = kept(running)
    verdict = running.evaluate(task(), solution(ASKS + prepare, forward))
    assert verdict.status == status and said in verdict.message, verdict
    assert kept(running) == before
    assert not list(running.sandbox._scratch.glob("worker-*"))  # type: ignore[union-attr]


@pytest.mark.nightly
def test_a_first_pass_gets_the_memory_that_the_sandbox_allows(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(first_pass_watchdog.LEAST_MEMORY_MB, "cpu", 300)
    running = start(memory_mb=900, clock="model")
    verdict = running.evaluate(task(), solution(ASKS + "keep = bytearray(450 << 20)\ntime.sleep(1)"))
    assert verdict.status == "ok", verdict


SPY = """
def attempt(action):
    try:
        return bool(action())
    except BaseException:
        return False
import urllib.request
seen = {
    "environment": list(os.environ),
    "socket": attempt(lambda: socket.socket()),
    "file": attempt(lambda: open(OUTSIDE).read()),
    "file by a program": attempt(lambda: subprocess.run(["cat", OUTSIDE], capture_output=True).stdout),
    "parent": attempt(lambda: open(f"/proc/{os.getppid()}/environ").read()),
    "signal": attempt(lambda: os.kill(os.getppid(), 0) or True),
    "written": attempt(lambda: open(OUTSIDE + "2", "w")),
    "others": attempt(lambda: os.listdir(os.path.join(os.getcwd(), "..", ".."))),
    "session": attempt(lambda: os.setsid()),
    "user": os.getuid(),
}
if os.access(".", os.W_OK):
    subprocess.Popen(["sleep", "987654"])
    os.symlink(OUTSIDE, "link")
    os.mkfifo("pipe")
    json.dump(seen, open("seen", "w"))
"""


def test_a_first_pass_sees_and_leaves_nothing_but_its_folder(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("secret")
    verdict = running.evaluate(task(), solution(ASKS + f"OUTSIDE = {str(tmp_path / 'file')!r}\n" + SPY))
    assert (verdict.status, verdict.message) == ("ok", "")
    place = kept(running)[-1]
    seen = json.loads((place / "seen").read_text())
    assert not any("CANARY" in name or "TOKEN" in name or "PYTEST" in name for name in seen.pop("environment"))
    assert seen.pop("user") != 0 or os.getuid() != 0
    assert not any(seen.values()), seen
    assert not (place / "link").is_symlink() and not (place / "pipe").exists()
    assert not processes_that_say("987654")


def test_the_answers_of_the_first_pass_are_wrong_in_the_second(running: Running) -> None:
    forward = """if os.path.exists("y.pt"):
            return torch.load("y.pt")
        y = torch.relu(x) * self.scale
        torch.save(y, "y.pt")
        return y"""
    verdict = running.evaluate(task(), solution(ASKS, forward))
    assert verdict.status == "wrong" and verdict.checks == 0


def test_sources_that_name_a_compiler_ask_for_a_first_pass() -> None:
    for line in (
        "from torch.utils.cpp_extension import load_inline", "import triton.language as tl", "m = torch.compile(m)",
        "torch . compile", "@torch.compile", "from torch import compile", "import torch._inductor.config",
    ):  # fmt: skip
        assert first_pass.asks(line), line
    for line in ("re.compile('x')", "import torch", "def compile(x): ...", "self.compiled = 1"):
        assert not first_pass.asks(line), line


def test_names_of_files_stay_inside_the_folder(running: Running) -> None:
    verdict = running.evaluate(task(), solution(ASKS, **{"../outside.cpp": ""}))
    assert verdict.status == "build_error" and "must stay inside the work folder" in verdict.message
    with_source = solution(
        ASKS + "TEXT = open('kernels/a.cpp').read()\nassert TEXT == 'here'", **{"kernels/a.cpp": "here"}
    )
    assert running.evaluate(task(), with_source).status == "ok"


CPU_SOURCE = r'''
from torch.utils.cpp_extension import load_inline
chain = load_inline(name="chain", functions=["chain"], extra_cflags=["-O2"], cpp_sources="""
#include <torch/extension.h>
torch::Tensor chain(torch::Tensor x, double s) {
  auto y = torch::empty_like(x);
  const float* a = x.data_ptr<float>();
  float* b = y.data_ptr<float>();
  for (long i = 0; i < x.numel(); i++) b[i] = a[i] > 0 ? a[i] * (float)s : 0;
  return y;
}
""")
'''
INLINE = solution(CPU_SOURCE, "return chain.chain(x, self.scale)")


@needs_ninja
def test_load_inline_works(running: Running) -> None:
    verdict = running.evaluate(task(), INLINE)
    assert (verdict.status, verdict.message, verdict.checks) == ("ok", "", 5)
    assert (kept(running)[-1] / "extensions" / "chain" / "stand-ins" / "chain.so").is_file()


CUDA_SOURCE = r'''
from torch.utils.cpp_extension import load_inline
chain = load_inline(name="chain", functions=["chain"],
cpp_sources="torch::Tensor chain(torch::Tensor x, double s);", cuda_sources="""
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>
__global__ void kernel(const float* x, float* y, long n, float s) {
  for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < n; i += (long)gridDim.x * blockDim.x)
    y[i] = fmaxf(x[i], 0.0f) * s;
}
torch::Tensor chain(torch::Tensor x, double s) {
  auto y = torch::empty_like(x);
  long n = x.numel();
  kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), n, (float)s);
  return y;
}
""")
'''


@pytest.mark.nightly
@needs_ninja
def test_cuda_sources_of_load_inline_compile_without_a_gpu(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        toolchain.find_nvcc()
    except toolchain.CompilerMissing:
        pytest.skip("no nvcc")
    monkeypatch.setattr(running.sandbox, "_architecture", "sm_90a")
    monkeypatch.setattr(running.sandbox._first_pass, "_seconds", 290.0)
    verdict = running.evaluate(task(), solution(CUDA_SOURCE, "assert chain.chain\n        " + HONEST))
    assert (verdict.status, verdict.message) == ("ok", "")
    assert (kept(running)[-1] / "extensions" / "chain" / "stand-ins" / "chain.so").is_file()


COMPILING = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "while True: pass"])
print("the program ended", flush=True)
while True: pass
"""


class OwnProcesses:
    """A process and the programs that it starts; records the signals that it gets from the watchdog."""

    def __init__(self, code: str) -> None:
        self.program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        self.pid = self.program.pid
        self.signals: list[int] = []

    def signal_all(self, number: int) -> None:
        self.signals.append(number)
        os.killpg(self.pid, number)

    def close(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        self.program.communicate()


def is_held(folder: Path) -> bool:
    with open(folder / "lease.lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def look_until(overrun: Callable[[Any], str], worker: OwnProcesses, there: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not there():
        assert time.monotonic() < end
        assert overrun(worker) == ""
        time.sleep(0.01)


@contextlib.contextmanager
def timing(folder: Path, still: Callable[[], bool] = lambda: True) -> Iterator[threading.Event]:
    """Times a kernel once in another thread. The event is set if ``still`` becomes true while the lease is held."""
    timed = threading.Event()

    def time_a_kernel() -> None:
        with contextlib.closing(Lease(folder)) as lease, lease.timing():
            end = time.monotonic() + 10
            while not still() and time.monotonic() < end:
                time.sleep(0.001)
            if still():
                timed.set()

    thread = threading.Thread(target=time_a_kernel)
    thread.start()
    yield timed
    thread.join()


def watching(folder: Path, device: str) -> contextlib.AbstractContextManager[Callable[..., str]]:
    """Watches as a first pass does with the default memory limit. The lease lies in the watched folder."""
    return first_pass_watchdog.watchdog((folder,), folder, device, first_pass_watchdog.LEAST_MEMORY_MB[device])


def test_a_gpus_kernels_are_timed_while_a_first_pass_compiles(tmp_path: Path) -> None:
    with (
        contextlib.closing(OwnProcesses(COMPILING)) as worker,
        watching(tmp_path, "cuda") as overrun,
    ):
        look_until(overrun, worker, lambda: not is_held(tmp_path))
        with timing(tmp_path) as timed:
            assert timed.wait(10)
        assert not worker.signals, "the compiler runs on beside it"
        for child in descendants(worker.pid):
            os.kill(child, signal.SIGKILL)
        worker.program.stdout.readline()  # type: ignore[union-attr]
        look_until(overrun, worker, lambda: is_held(tmp_path))
        with timing(tmp_path) as timed:
            assert not timed.wait(0.3), "the solution itself may use the GPU"
            look_until(overrun, worker, timed.is_set)
    assert worker.signals == 2 * [signal.SIGSTOP, signal.SIGCONT]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_first_pass_stops_only_while_another_process_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setitem(first_pass_watchdog._LEAST_RUN, device, 0.0)
    with (
        contextlib.closing(OwnProcesses("while True: pass")) as worker,
        watching(tmp_path, device) as overrun,
    ):
        looks = iter(range(20))
        look_until(overrun, worker, lambda: next(looks, None) is None)
        assert not worker.signals and is_held(tmp_path)
        with timing(tmp_path, still=lambda: state(f"/proc/{worker.pid}/stat") == "T") as timed:
            look_until(overrun, worker, timed.is_set)
        assert worker.signals[:2] == [signal.SIGSTOP, signal.SIGCONT] and is_held(tmp_path)


@pytest.mark.parametrize(
    ("path", "same"),
    [("/tmp/a.cu", False), ("/var/tmp/a.cu", True), ("./tmp/a.cu", True), ("//tmp/a.cu", True), ("/tmpfs/a.cu", True)],
)
def test_only_tmp_itself_is_a_folder_of_the_solutions_own(path: str, same: bool) -> None:
    code = f"open('{path}')"
    assert same_files.with_own_tmp(code, Path("/place")) == (code if same else f"open('/place{path}')")
