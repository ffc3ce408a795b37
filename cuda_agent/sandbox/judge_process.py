"""Starts a judge (the process that checks and times solutions), sends requests to it, and notices when it ends."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cuda_agent.errors import SandboxUnready, TaskError
from cuda_agent.sandbox.jail.warm_parent import KEEPING_MEMORY, chosen_gpus
from cuda_agent.sandbox.messages import FrameTooLarge, JudgeRequest, JudgeSettings, Reply, receive_frame, send_frame

# Seconds until a judge that says nothing counts as lost. A first strict verdict may compile five times for ten minutes.
_LONGEST_ANSWER = 3600.0
_QUARANTINE = 60.0  # seconds until a device that failed its health probe is asked again


class JudgeLost(Exception):
    """The judge process has ended, does not answer, or has a faulty device. This is a fault of the sandbox."""


class JudgeHandle:
    """Controls one judge process. Starts the process at the first request. If the process was lost, starts a new one at
    the next request. Sends one request at a time."""

    program = "cuda_agent.sandbox.judge.judge"

    def __init__(self, settings: JudgeSettings, scratch: Path) -> None:
        self._settings, self._scratch = settings, scratch
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = asyncio.Lock()
        self._quarantine = (0.0, "")  # until when (monotonic), and why
        self._killed = False
        self.pending = 0  # requests without an answer so far
        self.torch = ""  # version of the workers' torch, as in ``torch.__version__``, once the judge has started

    async def begin(self) -> None:
        """Starts the judge if it does not run. Raises ``SandboxUnready`` if the judge cannot start, or ``JudgeLost`` if
        ``kill`` was called or the judge's device is faulty."""
        async with self._turn:
            await asyncio.shield(asyncio.to_thread(self._begin))

    def _begin(self) -> None:
        with self._lock:
            self._refuse_if_lost()
            try:
                self._start()
            except (OSError, ValueError) as error:
                self._stop()
                self._refuse_if_lost()  # ``kill`` was called during the start
                raise SandboxUnready(f"the judge does not start: {error}; {self._last_line_of_log()}") from None

    @property
    def busy(self) -> bool:
        """Whether the judge is answering a request."""
        return self._turn.locked()

    @property
    def quarantined(self) -> bool:
        """Whether requests are refused, because the device failed the judge's health probe (a small test at the start)
        in the last ``_QUARANTINE`` seconds."""
        return time.monotonic() < self._quarantine[0]

    async def ask(self, operation: JudgeRequest, body: Mapping[str, Any]) -> Any:
        """Sends one request and returns the body of the answer. Raises ``TaskError`` if the task does not run,
        ``SandboxUnready`` if the jail or the GPU does not work, ``JudgeLost`` if the judge or its device fails, or
        ``FrameTooLarge`` if the request is too large."""
        self.pending += 1
        answer: asyncio.Future[Any] | None = None
        try:
            async with self._turn:
                answer = asyncio.ensure_future(asyncio.to_thread(self._ask, operation, body))
                answer.add_done_callback(self._answered)
                return await asyncio.shield(answer)
        finally:
            if answer is None:  # cancelled before its turn
                self.pending -= 1

    def _answered(self, answer: asyncio.Future[Any]) -> None:
        self.pending -= 1
        if not answer.cancelled():
            answer.exception()  # else asyncio would warn if a cancelled caller does not read it

    def _ask(self, operation: JudgeRequest, body: Mapping[str, Any]) -> Any:
        with self._lock:
            self._refuse_if_lost()
            try:
                self._start()
                send_frame(self._socket, operation, body)
                answer = receive_frame(self._socket)
            except FrameTooLarge:
                raise
            except (OSError, ValueError) as error:
                self._stop()
                lost = f"the judge was lost: {error}; {self._last_line_of_log()}"
                if not self._killed:
                    logging.getLogger(__name__).warning(lost)  # another judge may do its work
                raise JudgeLost(lost) from None
            if answer.operation == Reply.ERROR:
                raise TaskError(answer.body["message"])
            return answer.body

    def _refuse_if_lost(self) -> None:
        if self._killed:
            raise JudgeLost("the judge was ended")
        if self.quarantined:
            raise JudgeLost(self._quarantine[1])

    def _start(self) -> None:
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        package = str(Path(__file__).parents[2])
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "PYTHONPATH": package}
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **KEEPING_MEMORY, **chosen_gpus()}
        with open(self._scratch / "judge.log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.program, str(theirs.fileno())],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        theirs.close()
        self._socket = ours
        ours.settimeout(_LONGEST_ANSWER)
        if self._killed:  # ``kill`` was called during the start
            self._process.kill()
        send_frame(ours, JudgeRequest.CONFIGURE, asdict(self._settings))
        answer = receive_frame(ours)
        if answer.operation == Reply.ERROR:
            self._stop()
            if answer.body["kind"] != "device":
                raise SandboxUnready(answer.body["message"])
            self._quarantine = (time.monotonic() + _QUARANTINE, f"{answer.body['message']}: quarantined")
            raise JudgeLost(self._quarantine[1])
        self.torch = answer.body["torch"]

    def _last_line_of_log(self) -> str:
        with contextlib.suppress(OSError):
            return " ".join((self._scratch / "judge.log").read_text(errors="replace").splitlines()[-1:])
        return ""

    def _stop(self) -> None:
        if self._process is not None:
            self._socket.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        with self._lock:
            self._stop()

    def kill(self) -> None:
        """Kills the judge at once, even during a request. Later requests do not start it again."""
        self._killed = True
        if (process := self._process) is not None:
            process.kill()
