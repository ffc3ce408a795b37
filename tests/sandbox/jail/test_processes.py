"""The judge's handle of a process: what it makes of answers, of silence, of too much use, and of every kind of end."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.sandbox.jail import processes
from cuda_agent.sandbox.jail.descendants import state
from cuda_agent.sandbox.jail.jail import JailPolicy
from cuda_agent.sandbox.jail.processes import JailedProcess, NotStarted, WorkerDied, WorkerError
from cuda_agent.sandbox.messages import WorkerOperation

PEER = """
import os, signal, socket, sys, time
from cuda_agent.sandbox.messages import HEAD, Reply, receive_frame, send_frame
channel = socket.socket(fileno=int(sys.argv[1]))
def answer(body=None): send_frame(channel, Reply.RESULT, body)
def fail(body): send_frame(channel, Reply.ERROR, body)
"""
SERVE = """
answer()
while True:
    frame = receive_frame(channel)
    BODY
"""


class Parent:
    """Starts ordinary processes where the warm parent would fork jailed ones."""

    def __init__(self, script: str) -> None:
        self._script = script
        self.pid = 0

    def fork(self, options: Any, fds: Sequence[int]) -> int:
        command = [sys.executable, "-c", self._script, str(fds[0])]
        self.process = subprocess.Popen(command, pass_fds=fds, stderr=subprocess.DEVNULL)
        self.pid = self.process.pid
        return self.pid

    def reap(self, pid: int) -> int:
        return self.process.wait()


Start = Callable[..., JailedProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A process that answers each request by ``body``."""
    started: list[JailedProcess] = []

    def make(body: str = "answer(frame.slot)", script: str = SERVE, shared: bool = False, **more: Any) -> JailedProcess:
        home = tmp_path / f"home-{len(started)}"
        home.mkdir()
        parent: Any = Parent(PEER + script.replace("BODY", body))
        options: Any = {"role": "reference"}
        worker = JailedProcess(parent, options, JailPolicy(shared_memory=shared), 400, home, **more)
        started.append(worker)
        worker.wait_started()
        worker.seconds = 20.0
        return worker

    yield make
    for worker in started:
        worker.kill()


def ended(worker: JailedProcess, **call: Any) -> tuple[str, str]:
    with pytest.raises(WorkerDied) as death:
        worker.call(WorkerOperation.RUN, **call)
    assert not worker.alive and not worker._home.exists()
    return death.value.reason, str(death.value)


def test_an_answer_is_its_body_and_the_process_stays(start: Start) -> None:
    worker = start()
    assert [worker.call(WorkerOperation.RUN, slot=slot) for slot in (4, 5)] == [4, 5]
    assert worker.alive


def test_an_error_of_untrusted_code_leaves_it_alive_and_its_text_on_one_line(start: Start) -> None:
    worker = start('fail({"message": "a\\nb\\x1b[2J" + "x" * 5000, "cheat": frame.slot == 1})')
    for slot, cheat in ((0, False), (1, True)):
        with pytest.raises(WorkerError) as error:
            worker.call(WorkerOperation.RUN, slot=slot)
        assert error.value.cheat == cheat and str(error.value).startswith("a b [2Jx") and len(str(error.value)) == 2000
    assert worker.alive


@pytest.mark.parametrize(
    ("body", "reason", "words"),
    [
        ("channel.sendall(b'x' * 8)", "protocol", "answered nonsense"),
        ("channel.sendall(HEAD.pack(0, 0, 0, 5) + b'12{}3')", "protocol", "answered nonsense"),
        ("send_frame(channel, frame.operation)", "protocol", "answered nonsense"),
        ("os._exit(3)", "crash", "ended itself (exit 3)"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crash", "SIGSEGV (an address out of bounds"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed", "was ended by SIGKILL"),
        ("os.kill(os.getpid(), 40)", "crash", "was ended by signal 40"),
    ],
)
def test_every_end_has_its_reason(start: Start, body: str, reason: str, words: str) -> None:
    found, text = ended(start(body))
    assert (found, words in text) == (reason, True), text


def test_its_time_is_what_was_waited_for(start: Start) -> None:
    worker = start("time.sleep(60)")
    worker.seconds = 0.1
    begin = time.monotonic()
    assert ended(worker) == ("timeout", "did not finish in time")
    assert time.monotonic() - begin < 10


def test_memory_and_threads_of_its_own_are_watched(start: Start) -> None:
    memory = "kept = bytearray(os.urandom(1 << 20) * 900); time.sleep(20)"
    assert ended(start(memory)) == ("memory", "used more than 400 MB")
    threads = "import threading; [threading.Thread(target=time.sleep, args=(20,)).start() for _ in range(70)]"
    assert ended(start(threads)) == ("threads", "started more than 64 threads")


def test_memory_that_many_short_requests_keep_is_watched(start: Start) -> None:
    worker = start("globals().setdefault('kept', []).append(os.urandom(1 << 20) * 8); answer()")
    with pytest.raises(WorkerDied, match="used more than 400 MB"):
        for _ in range(200):
            worker.call(WorkerOperation.RUN)


def test_shared_memory_counts_where_it_may_be_made(start: Start) -> None:
    memory = "import mmap; kept = mmap.mmap(-1, 900 << 20); kept[:] = bytes(900 << 20); time.sleep(20)"
    assert ended(start(memory, shared=True)) == ("memory", "used more than 400 MB")


def test_a_further_watchdog_names_what_is_too_much(start: Start) -> None:
    too_much: list[str] = []
    worker = start("time.sleep(20)", overrun=lambda worker: "".join(too_much))
    too_much.append("disk")
    assert ended(worker) == ("disk", "wrote too many or too large files")


def test_a_timed_call_runs_between_two_stops(start: Start) -> None:
    worker = start("time.sleep(0.05); answer([frame.slot, frame.extra])")
    seconds, answer = worker.timed(WorkerOperation.RUN, 1, extra=9)
    assert answer == [1, 9] and 0.05 <= seconds < 5
    assert worker._state() in "Tt"
    assert worker.call(WorkerOperation.RUN) == [0, 0], "the next request lets it go on"


def test_an_answer_that_comes_before_its_timed_request_is_none(start: Start) -> None:
    worker = start("channel.sendall(2 * (HEAD.pack(0, 0, 0, 4) + b'null'))")
    worker.call(WorkerOperation.RUN)
    with pytest.raises(WorkerDied) as death:
        worker.timed(WorkerOperation.RUN, 0)
    assert death.value.reason == "protocol"


def test_it_stands_still_between_two_requests(start: Start) -> None:
    """A thread that it left behind takes no time from another worker that is timed."""
    worker = start("answer(); exec('while True: pass')")
    worker.call(WorkerOperation.RUN)
    worker.stop()
    before = _processor_time(worker)
    time.sleep(0.2)
    assert _processor_time(worker) == before


def test_stopping_waits_for_a_thread_inside_a_long_system_call(start: Start) -> None:
    copy = (
        "import threading; file = os.memfd_create('a'); os.truncate(file, 2 << 30); part = [bytearray(4 << 20)] * 512"
    )
    forever = "lambda: any(os.preadv(file, part, 0) < 0 for _ in iter(int, 1))"
    worker = start(f"{copy}; threading.Thread(target={forever}).start(); answer()")
    worker.call(WorkerOperation.RUN)
    worker.stop()
    states = [state(str(stat)) for stat in Path(f"/proc/{worker.pid}/task").glob("*/stat")]
    assert len(states) > 1 and set(states) <= set("Tt"), states


def test_stopping_waits_for_no_thread_if_nothing_needs_the_proof(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start()
    monkeypatch.setattr(worker, "_signal", lambda number: None)
    monkeypatch.setattr(worker, "_state", lambda: "R")
    worker.verified = False
    begin = time.monotonic()
    worker.stop()
    worker.timed(WorkerOperation.RUN, 0)
    assert worker.alive and time.monotonic() - begin < processes._STOP_SECONDS


def test_one_that_does_not_stop_ends_and_its_next_request_says_why(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start()
    monkeypatch.setattr(worker, "_signal", lambda number: number == signal.SIGKILL and worker._parent.process.kill())
    monkeypatch.setattr(processes, "_STOP_SECONDS", 0.2)
    worker.stop()
    assert not worker.alive
    for request in (lambda: worker.call(WorkerOperation.RUN), lambda: worker.timed(WorkerOperation.RUN, 0)):
        with pytest.raises(WorkerDied, match="after it was stopped") as death:
            request()
        assert death.value.reason == "running"


def _processor_time(worker: JailedProcess) -> list[str]:
    return Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[11:13]


def test_one_that_ends_before_it_serves_is_our_fault(start: Start) -> None:
    with pytest.raises(NotStarted, match=r"ended itself \(exit 7\) before it began"):
        start(script="sys.exit(7)")


def test_a_file_handed_over_has_a_place_of_its_own_and_the_cache_is_safe(start: Start, tmp_path: Path) -> None:
    worker = start()
    first, second = tmp_path / "a.so", tmp_path / "b.so"
    first.write_text("first")
    second.write_text("second")
    place = Path(worker.hand_over(first, "library"))
    assert place == worker._home / "library.so" and place.read_text() == "first"
    assert worker.hand_over(second, "library") == str(place) and place.read_text() == "second"
    assert first.read_text() == "first"


def test_the_dead_stay_dead(start: Start) -> None:
    worker = start()
    assert worker.kill()[0] == -signal.SIGKILL
    assert worker.kill()[0] == 0 and not worker.alive
    with pytest.raises(WorkerDied):
        worker.call(WorkerOperation.RUN)
