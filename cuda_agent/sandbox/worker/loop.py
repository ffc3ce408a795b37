"""Answers the judge's messages in a worker, one by one. Runs untrusted Python code and reports errors of this code."""

import linecache
import os
import socket
import subprocess
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cuda_agent.sandbox import driver
from cuda_agent.sandbox.messages import Frame, Reply, WorkerOperation, receive_frame, send_frame
from cuda_agent.sandbox.wire import NO_PROGRAMS

_SOURCES = ("model.py", "model_new.py")  # names under which untrusted Python runs


class WorkerLoop:
    """Receives requests (frames) over a socket, and answers each. At first, it answers the operations for which the
    subclass has a method of the same name (see ``WorkerOperation``). A method may change ``self._commands`` (the
    functions by operation), so that the worker answers other operations."""

    def __init__(self, channel: socket.socket, options: dict[str, Any]) -> None:
        self._channel = channel
        self._options = options
        self._commands: dict[str, Callable[[Frame], Any]] = {
            operation: getattr(self, operation) for operation in WorkerOperation if hasattr(self, operation)
        }
        self._clocked: Callable[..., tuple[Any, Any]] = lambda call, extra=0: (call(), None)
        if options["device"] == "cuda":
            from cuda_agent.sandbox.worker.gpu import DeviceClock

            self._clocked = DeviceClock()

    def serve(self) -> None:
        while True:
            frame = receive_frame(self._channel, max_fds=4)
            try:
                answer = self._commands[frame.operation](frame)
            except MemoryError:
                send_frame(self._channel, Reply.ERROR, {"message": "out of memory"})
            except BaseException as error:
                failure = {"message": explain(error), "cheat": type(error).__name__ == "Cheat"}
                send_frame(self._channel, Reply.ERROR, failure)
            else:
                send_frame(self._channel, Reply.RESULT, answer)

    def settle(self) -> None:
        """Waits until the GPU has finished its work, because the judge copies the outputs as soon as it has the answer.
        Does nothing on the CPU."""
        if self._options["device"] == "cuda":
            torch.cuda.synchronize()


def explain(error: BaseException) -> str:
    """Returns a message about ``error`` for the author of untrusted code. The message has the error's type and first
    line, and the innermost line number of untrusted source in the traceback. For an error of the CUDA driver, the
    message explains the error code instead."""
    if isinstance(error, driver.DriverError):
        return driver.explain(error)
    code = getattr(error, "error_code", None)  # torch reports an error of the driver here
    if isinstance(code, int) and driver.explain_code(code):
        return driver.explain_code(code)
    lines = [str(line) for line in str(error).strip().splitlines() if line.strip()]
    where = ""
    for entry in traceback.extract_tb(error.__traceback__):
        if entry.filename in _SOURCES:
            where = f" ({entry.filename} line {entry.lineno})"
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({os.path.basename(error.filename)} line {error.lineno})"
        lines = [error.msg]
    message = lines[0] if lines else ""
    if message.endswith(":") and len(lines) > 1:
        message += f" {lines[-1].strip()}"  # compilers name the place first and the error last
    if message.startswith("[enforce fail at") or "DefaultCPUAllocator" in message:
        message = "out of memory: " + message.rpartition("DefaultCPUAllocator:")[2].strip()
    return f"{type(error).__name__}: {message}"[:600] + where + (f"; {NO_PROGRAMS}" if _wanted_compiler(error) else "")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields ``error`` and the chain of its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _wanted_compiler(error: BaseException) -> bool:
    """Returns whether ``error`` probably arose because the jail forbids the worker to start programs or to create
    files."""
    for cause in causes(error):
        if isinstance(cause, PermissionError) and cause.filename and not os.path.exists(cause.filename):
            return True
        if isinstance(cause, PermissionError) and cause.__traceback__ is not None:
            last = traceback.extract_tb(cause.__traceback__)[-1]
            if last.filename == subprocess.__file__ or last.name == "play_back":
                return True
    return False


def run_module(name: str, code: str, filename: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = filename
    sys.modules[name] = module
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)  # inspect.getsource works
    exec(compile(code, filename, "exec"), module.__dict__)
    return module


def build_model(code: str, init: list[Any], options: dict[str, Any]) -> torch.nn.Module:
    """Runs a solution's ``code``, and returns ``ModelNew(*init)``. ``options`` holds the model's ``device``, and
    ``train_mode``, which is true for training mode. Raises ``AttributeError`` if ``code`` defines no ``ModelNew``."""
    module = run_module("model_new", code, "model_new.py")
    if not hasattr(module, "ModelNew"):
        raise AttributeError("model_new.py defines no ModelNew")
    model: torch.nn.Module = module.ModelNew(*init).train(options["train_mode"]).to(options["device"])
    return model
