"""Runs the untrusted side of the sandbox: the warm parent and the workers that it forks.

``python -m cuda_agent.sandbox.worker.main FD`` is the warm parent: it imports torch, starts no thread, and forks
workers on request. ``FD`` is the descriptor of the socket for these requests. A worker enters the jail, then answers
requests over its own socket. There are three kinds of workers:

- A *reference* worker runs the task's own model.
- A *candidate* worker runs a solution.
- A *first pass* runs a solution that starts compilers, and records their results for the candidate worker (see
  ``replay``)."""

# ruff: noqa: E402
import gc

gc.disable()  # during the imports, whose objects stay anyway: collection takes a tenth of the start

import contextlib
import ctypes
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cuda_agent.sandbox.jail import jail
from cuda_agent.sandbox.jail.descendants import descendants
from cuda_agent.sandbox.messages import Frame, Reply, WorkerOperation, receive_frame, send_frame
from cuda_agent.sandbox.worker import gpu, observe
from cuda_agent.sandbox.worker.candidate import Candidate
from cuda_agent.sandbox.worker.reference import Reference
from cuda_agent.sandbox.worker.replay import RecordingPass

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_START_SECONDS = 30


def main() -> None:
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])


def _serve(control: socket.socket, imports: Sequence[str]) -> None:
    """Runs a warm parent: a process that has imported torch, and forks workers and further warm parents at the request
    of its client. It also imports the modules ``imports``, so that its workers inherit them. ``control`` is the socket
    to the client. Returns when the client has closed the socket."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopts the orphans of a dead worker
    gc.disable()
    for name in imports:
        __import__(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    threads = len(os.listdir("/proc/self/task"))
    ready = {"threads": threads, "torch": torch.__version__, "opened_gpu": gpu.is_open()}
    send_frame(control, Reply.RESULT, ready)
    children: set[int] = set()
    while True:
        try:
            frame = receive_frame(control, max_fds=8)
        except ConnectionError:
            for pid in children:
                with contextlib.suppress(OSError):  # the worker has no process group
                    os.killpg(pid, signal.SIGKILL)
            _kill_orphans(set())
            return
        if frame.operation in (WorkerOperation.FORK_WORKER, WorkerOperation.FORK_PARENT):
            parent, pid = os.getpid(), os.fork()
            if pid == 0 and frame.operation == WorkerOperation.FORK_PARENT:
                control.close()
                return _serve(socket.socket(fileno=frame.fds[0]), frame.body["imports"])
            if pid == 0:
                control.detach()
                _child(frame, parent)
            children.add(pid)
            for descriptor in frame.fds:
                os.close(descriptor)
            send_frame(control, Reply.RESULT, {"pid": pid})
        elif frame.operation == WorkerOperation.REAP_WORKER:
            _, status = os.waitpid(frame.body["pid"], 0)
            children.discard(frame.body["pid"])
            _kill_orphans(children)
            send_frame(control, Reply.RESULT, {"status": os.waitstatus_to_exitcode(status)})


def _kill_orphans(living: set[int]) -> None:
    """Kills the processes that dead workers left behind: all descendants of this process, except the workers in
    ``living`` and their descendants. Stops all of them before it kills them, because a fork bomb would otherwise start
    new ones."""
    seen: set[int] = set()
    while found := descendants(os.getpid(), living):
        standing = found <= seen
        seen |= found
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if standing else signal.SIGSTOP)
        for pid in found if standing else ():
            with contextlib.suppress(ChildProcessError):  # a process is not ours before its parent is gone
                os.waitpid(pid, 0)


def _child(frame: Frame, parent: int) -> None:
    """Runs a freshly forked worker and never returns. ``frame`` holds the worker's options. ``parent`` is the process
    id of the warm parent."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.alarm(_START_SECONDS)  # a driver that hangs must not hold the timing lease
        options: dict[str, Any] = frame.body
        null = os.open("/dev/null", os.O_RDWR)
        keep = sorted((*frame.fds, null))
        os.dup2(null, 0)
        os.dup2(null, 1)
        low = 3
        for descriptor in (*keep, 4096):
            os.closerange(low, descriptor)
            low = descriptor + 1
        os.chdir(options["folder"])
        os.environ.update(options["environment"])
        tempfile.tempdir = options["folder"]  # libraries ask for a temporary folder, even if none is writable
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        if options["device"] == "cuda":
            gpu.open_gpu()  # the driver writes below /proc at its start, which the walls forbid
            if options.get("profiler"):  # the profiler opens the device's files
                os.environ["KINETO_LOG_LEVEL"] = "5"  # no warnings about a trace without the host's part
                with contextlib.suppress(RuntimeError):  # not allowed on this machine: an observed call will say so
                    observe.kernels(lambda: torch.zeros(1, device="cuda"))
        policy = jail.JailPolicy(**options["policy"])
        if policy.one_group:
            os.setpgid(0, 0)
        jail.enter(policy)  # changes the user, and sets the signal of the parent's death again
        if os.getppid() != parent:
            os._exit(70)  # the parent died before the signal was set
        os.dup2(null, 2)
        os.close(null)  # errors before this line are the sandbox's and go to the log
        signal.alarm(0)
        for lent in frame.fds[1:]:
            os.close(lent)
        channel = socket.socket(fileno=frame.fds[0])
        send_frame(channel, Reply.RESULT)
        torch.set_num_threads(options["threads"])
        torch.set_grad_enabled(False)
        serve = {"reference": Reference, "candidate": Candidate, "first_pass": RecordingPass}[options["role"]]
        serve(channel, options).serve()
    except ConnectionError:
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(70)
    os._exit(0)


if __name__ == "__main__":
    main()
