"""What untrusted code can do to those who run it: their files, their messages, their handling of its end."""

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest

from cuda_agent.errors import TaskError
from cuda_agent.sandbox.build.builder import BuildError, first_errors
from cuda_agent.sandbox.jail import jail
from cuda_agent.sandbox.jail.descendants import deleted_bytes
from cuda_agent.sandbox.jail.processes import JailedProcess
from cuda_agent.sandbox.jail.warm_parent import warm_parent
from cuda_agent.sandbox.judge.memory.check import mismatch
from cuda_agent.sandbox.messages import HEAD, WorkerOperation, receive_frame
from cuda_agent.sandbox.wire import Solution, Tensor
from tests.sandbox.conftest import CHAIN, KERNEL, Running, plan_solution, task


def test_a_death_by_a_signal_without_a_name_is_a_crash_and_not_our_fault(running: Running) -> None:
    suicide = "#include <signal.h>\n#include <unistd.h>\n" + KERNEL.replace("long low", "kill(getpid(), 35); long low")
    verdict = running.evaluate(task(), plan_solution(suicide))
    assert (verdict.status, verdict.reward) == ("crash", -1)
    assert "signal 35" in verdict.message


@pytest.mark.parametrize("name", ["@options.cpp", "-fplugin=x.cpp", "a/" + "b" * 300 + ".cpp", "kernels", "nul\0.cpp"])
def test_a_file_name_that_is_none_is_a_build_error(running: Running, name: str) -> None:
    solution = plan_solution()
    verdict = running.evaluate(task(), Solution("plan", {**solution.files, name: "int a;"}))
    assert (verdict.status, verdict.reward) == ("build_error", -1)


def test_text_that_is_no_text_is_a_build_error(running: Running) -> None:
    verdict = running.evaluate(task(), plan_solution(KERNEL + "// \ud800"))
    assert verdict.status == "build_error"


def test_messages_of_untrusted_code_are_one_line_that_can_be_shown(running: Running) -> None:
    code = "class ModelNew:\n    def __init__(self, *_):\n        raise ValueError('\\x1b[2J\\u202ecrash\\ud800')"
    verdict = running.evaluate(task(), Solution("python", {"model_new.py": code}))
    assert verdict.status == "build_error" and verdict.message.isprintable()
    assert first_errors("k.cpp:1:1: error: \x1b[2Jno\n").isprintable()


def test_a_compilers_message_with_a_very_long_line_is_read_at_once() -> None:
    """It took the square of the line's length: minutes, in which the whole process stood still."""
    line = " " * 500_000
    shown = first_errors(f"k.cpp:1:1: error: static assertion failed:\n{line}^\n 12 |   int x;\n")
    assert shown == "k.cpp:1:1: error: static assertion failed:\n    int x;"
    assert len(first_errors(f"k.cpp:1:1: error: {line}x\n    y{line}z\n")) <= 1200


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("x.to(torch.float8_e4m3fn)", "tensors of float8_e4m3fn, which are not supported"),
        ("x", "nonsense"),
    ],
)
def test_a_task_of_unknown_types_or_with_a_forged_description_is_a_task_error(
    running: Running, output: str, words: str
) -> None:
    code = CHAIN.replace("torch.relu(x) * self.scale", output)
    if words == "nonsense":
        code += (
            "\nimport os, struct, json\nbody = json.dumps({'inputs': 7}).encode()\n"
            "for d in range(3, 9):\n    try: os.write(d, struct.pack('<BBHI', 61, 0, 0, len(body)) + body)\n"
            "    except OSError: pass\n"
        )
    with pytest.raises(TaskError, match=words):
        running.evaluate(task(code), plan_solution())


FORGED = """
from cuda_agent.sandbox.worker import loop
def forged(channel, operation, body=None, send=loop.send_frame):
    spec = body
    if isinstance(spec, dict) and "parameter_count" in spec:
        FORGERY
    send(channel, operation, body)
loop.send_frame = forged
"""


@pytest.mark.parametrize(
    "forgery",
    [
        "spec['outputs'][0]['shape'] = [32, 128.0]", "spec['inputs'][0]['shape'] = [-32, -128]",
        "spec['outputs'][0]['shape'] = [True, 4096]", "spec['outputs'][0]['shape'] = [1 << 62, 4]",
        "spec['outputs'][0]['dtype'] = 7", "spec['arguments'] = [{'tensor': 3}]", "spec['init'] = [7]",
        "spec['parameter_count'] = float('inf')",
        "spec['init'] = [{'value': __import__('functools').reduce(lambda v, _: [v], range(300), 7)}]",
    ],
)  # fmt: skip
def test_a_task_that_describes_itself_wrongly_is_a_task_error_and_the_judge_lives(
    running: Running, forgery: str
) -> None:
    running.probe(task())
    judge = running.sandbox._judges[0]._process
    code = FORGED.replace("FORGERY", forgery) + CHAIN
    with pytest.raises(TaskError, match="the task answered nonsense"):
        running.evaluate(task(code), plan_solution())
    assert running.sandbox._judges[0]._process is judge


@pytest.mark.nightly
def test_files_too_large_for_a_message_are_the_solutions_fault_and_the_judge_lives(running: Running) -> None:
    files = {f"{number}.h": "\x01" * (1 << 20) for number in range(3)}
    running.probe(task())
    judge = running.sandbox._judges[0]._process
    verdict = running.evaluate(task(), Solution("plan", {**plan_solution().files, **files}))
    assert (verdict.status, verdict.reward) == ("build_error", -1), verdict
    module = {"model_new.py": "import compile  # " + "\x01" * (3 << 20)}
    assert running.evaluate(task(), Solution("python", module)).status == "build_error"
    with pytest.raises(TaskError, match="too large"):
        running.evaluate(task(CHAIN + "#" + "\x01" * (3 << 20)), plan_solution())
    assert "too large" in running.probe(task(CHAIN + "#" + "\x01" * (3 << 20))).error
    assert running.sandbox._judges[0]._process is judge


@pytest.mark.parametrize(
    "fill",
    [
        "for number in range(5): os.truncate(os.open(f'f{number}', os.O_CREAT | os.O_WRONLY), 15 << 20)",
        "for number in range(1100): os.close(os.open(f'f{number}', os.O_CREAT | os.O_WRONLY))",
        "for number in range(5): os.truncate(os.open('f', os.O_CREAT | os.O_WRONLY), 15 << 20); os.unlink('f')",
    ],
    ids=["the sum", "the number", "the sum of deleted ones"],
)
def test_the_files_of_a_task_are_bounded(running: Running, fill: str) -> None:
    with pytest.raises(TaskError, match="the task wrote too many or too large files"):
        running.evaluate(task(f"{CHAIN}\nimport os, time\n{fill}\ntime.sleep(3)\n"), plan_solution())


def test_memory_of_the_judge_is_no_file_of_a_task(tmp_path: Path) -> None:
    """An area has no name, like a deleted file, and a worker holds its descriptor while it maps it."""
    holds_both = (
        "import os, sys\narea = os.memfd_create('area')\nos.truncate(area, 1 << 30)\n"
        "file = open('deleted', 'wb')\nos.truncate(file.fileno(), 1 << 20)\nos.unlink('deleted')\n"
        "print('ready', flush=True)\nsys.stdin.read()\n"
    )
    # A process without the deleted files that pytest itself holds open.
    command = [sys.executable, "-c", holds_both]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == b"ready\n"
        assert deleted_bytes(process.pid, {tmp_path.stat().st_dev}) == 1 << 20
        process.stdin.close()


def test_numbers_too_far_apart_leave_a_verdict_that_is_json() -> None:
    far = numpy.array([3e38], numpy.float32)
    message, error = mismatch([far], [-far], [Tensor((1,), "float32")], 1e-2)
    assert message and numpy.isfinite(error)


def test_inputs_of_other_generators_come_from_the_judges_seed(running: Running) -> None:
    """Workers are forked from one parent: a generator that nobody seeds has the same state in all of them."""
    code = CHAIN.replace("return [torch.randn(32, 128)]", "return [torch.from_numpy(numpy.random.rand(32, 128))]")
    code = "import numpy\n" + code
    guess = (
        "import numpy, torch\nguesses = [torch.from_numpy(numpy.random.rand(32, 128)) for _ in range(40)]\n"
        "class ModelNew(torch.nn.Module):\n    def __init__(self, scale):\n        super().__init__()\n"
        "        self.scale = scale\n    def forward(self, x):\n"
        "        assert not any(bool((x == guess).all()) for guess in guesses), 'guessed'\n"
        "        return torch.relu(x) * self.scale\n"
    )
    verdict = running.evaluate(task(code), Solution("python", {"model_new.py": guess}))
    assert (verdict.status, verdict.message) == ("ok", "")


def test_two_builds_at_once_of_a_name_that_cannot_be_written_both_fail(running: Running) -> None:
    async def both() -> list[object]:
        files = {"k.cpp": "int a;", "k.cpp/b.cpp": "int b;"}
        builds = [running.sandbox._builder.library(files, ["k.cpp"]) for _ in range(2)]
        return list(await asyncio.gather(*builds, return_exceptions=True))

    assert all(isinstance(error, BuildError) for error in running.wait(both()))


def test_a_frame_that_comes_in_drops_is_given_up() -> None:
    """Each drop comes in time, the whole never does."""
    ours, theirs = socket.socketpair()
    ours.settimeout(0.3)

    def drip() -> None:
        theirs.sendall(HEAD.pack(0, 0, 0, 1000))
        for _ in range(100):
            try:
                theirs.send(b" ")
            except OSError:
                return
            time.sleep(0.02)

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        receive_frame(ours)
    ours.close()
    thread.join()
    theirs.close()


def test_a_compiler_that_never_stops_talking_fills_no_memory(running: Running) -> None:
    talk = "".join('#pragma message("' + "x" * 1000 + '")\n' for _ in range(3000))
    verdict = running.evaluate(task(), plan_solution(talk + KERNEL.replace("y[i] =", "undeclared[i] =")))
    assert verdict.status == "build_error" and len(verdict.message) <= 1200


LEAVING = (
    """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "SECONDS"])
    os._exit(0)
"""
    + CHAIN
)


def test_processes_that_a_worker_leaves_are_ended_with_it_and_share_its_few_processors(tmp_path: Path) -> None:
    """Workers that may run a compiler can leave some; they would work beside what is timed next."""
    seconds = f"{300 + secrets.randbelow(10**6) / 10**6}"
    tmp_path.chmod(0o755)
    parent = warm_parent(1, tmp_path / "log")
    parent.wait_ready()
    execute = (*jail.SYSTEM_EXECUTE, sys.prefix, sys.base_prefix)
    policy = jail.JailPolicy(read=(*jail.SYSTEM_READ, sys.prefix, sys.base_prefix), execute=execute, read_any=True)
    options = {
        "role": "reference",
        "threads": 1,
        "folder": str(tmp_path),
        "environment": {},
        "device": "cpu",
        "train_mode": False,
    }
    worker = JailedProcess(parent, options, policy, 400, tmp_path / "home")
    worker.wait_started()
    worker.seconds = 20.0
    worker.call(WorkerOperation.OPEN_TASK, {"code": LEAVING.replace("SECONDS", seconds), "seed": 1})

    def left() -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if seconds.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                pass
        return found

    until = time.monotonic() + 10
    while not left() and time.monotonic() < until:
        time.sleep(0.01)
    (orphan,) = left()
    assert len(os.sched_getaffinity(orphan)) == 1
    worker.kill()
    assert left() == []
    parent.close()
