"""Runs the processes of workspaces. A workspace is the work folder of one agent, with a shell and file tools.

``python -m cuda_agent.sandbox.workspace.worker FD FOLDER`` starts the warm parent: a process that forks one child,
called the worker, for each workspace. The warm parent has one thread and does not import torch. ``FD`` is the
descriptor of a socket to the client (module ``client``). When the client asks for a workspace, the warm parent makes a
folder below ``FOLDER`` and forks the worker. When the client closes the workspace, the warm parent kills the remaining
processes and removes the folder. A worker first enters a jail. Then it serves the client over a second socket, one tool
call after the other."""

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from typing import Any

from cuda_agent.sandbox.jail import jail
from cuda_agent.sandbox.jail.descendants import descendants
from cuda_agent.sandbox.messages import Reply, WorkspaceOperation, receive_frame, send_frame
from cuda_agent.sandbox.workspace import background, notebook
from cuda_agent.sandbox.workspace import shell as processes
from cuda_agent.sandbox.workspace.files import Folder, ToolRefused
from cuda_agent.sandbox.workspace.shell import BASH, WRAPPER, CommandLimits, Shell, cut, fork, kill, reap


def main() -> None:
    """Runs the warm parent, the process that forks a worker for each workspace. Opens and closes workspaces at the
    client's request. When the client disconnects, kills all workers, removes all folders and returns."""
    control, root = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    processes.prctl(processes.PR_SET_DUMPABLE, 0)
    processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
    wake = processes.wake_on_child()
    gc.collect()
    gc.freeze()
    workers: dict[int, int] = {}  # number -> pid
    helpers: set[int] = set()  # pids that remove folders
    closed: set[int] = set()
    send_frame(control, Reply.RESULT)
    while True:
        strays = descendants(os.getpid(), helpers.union(workers.values()))
        kill(strays)
        ready, _, _ = select.select([control.fileno(), wake], [], [], 0.05 if strays or closed else None)
        if wake in ready:
            processes.drain(wake)
        for pid in reap():
            helpers.discard(pid)
            workers = {number: worker for number, worker in workers.items() if worker != pid}
        if control.fileno() in ready:
            try:
                frame = receive_frame(control, max_fds=1)
            except ConnectionError:
                break
            number = int(frame.body)
            folder = f"{root}/{number}"
            if frame.operation == WorkspaceOperation.OPEN:
                os.mkdir(folder, 0o700)
                workers[number] = fork(partial(_worker, frame.fds[0], folder))
            else:
                kill([workers[number]] if number in workers else [])
                closed.add(number)
            for descriptor in frame.fds:
                os.close(descriptor)
        for number in closed - workers.keys():
            closed.discard(number)
            helpers.add(fork(partial(_remove, f"{root}/{number}")))
    deadline = time.monotonic() + 60  # on a busy machine a killed process takes long to end
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        kill(left)
        reap()
        time.sleep(0.01)
    _remove(root)


def _remove(folder: str) -> None:
    """Removes a folder with ``rm`` and ``chmod``, because a hostile folder can be nested too deep for Python, or forbid
    access."""
    for program in (["/bin/rm", "-rf"], ["/bin/chmod", "-R", "u+rwx"], ["/bin/rm", "-rf"]) * 3:
        if not os.path.lexists(folder):
            return
        subprocess.run([*program, folder], stderr=subprocess.DEVNULL)


def _worker(descriptor: int, folder: str) -> None:
    """Runs one workspace in this forked child. ``descriptor`` is the workspace's socket to the client."""
    signal.set_wakeup_fd(-1)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, 4096)
    os.setsid()
    client = socket.socket(fileno=descriptor)
    opening = receive_frame(client).body
    limits = CommandLimits(**opening["limits"])
    policy = jail.JailPolicy(
        read=(*jail.SYSTEM_READ, "/proc"), write=(folder,), execute=(*jail.SYSTEM_EXECUTE, folder),
        memory_mb=limits.memory_mb, processes=limits.processes,
    )  # fmt: skip
    jail.enter(policy)
    os.umask(0o077)
    for name in ("work", "tmp", "pipes", "bin"):
        os.mkdir(f"{folder}/{name}")
    files = opening["files"]
    work = Folder(f"{folder}/work", {name: files.get(name) for name in opening["protected"]})
    work.fill(files)
    session = Session(client, folder, work, limits)
    send_frame(client, Reply.RESULT)
    session.serve()


class Session:
    """Serves one workspace: runs tool calls, and returns the work folder's files to the client."""

    def __init__(self, client: socket.socket, folder: str, files: Folder, limits: CommandLimits) -> None:
        self.client, self.folder, self.files, self.limits = client, folder, files, limits
        self.shell = Shell(folder, limits, files, client)
        self.backgrounds = background.Backgrounds(self.shell)
        self.shell.paused = self.backgrounds.paused

    def serve(self) -> None:
        while True:
            frame = receive_frame(self.client)
            if frame.operation == WorkspaceOperation.CALL_TOOL:
                text, error = self._call(frame.body["tool"], frame.body["arguments"])
                send_frame(self.client, Reply.RESULT, {"text": text, "error": error})
            elif frame.operation == WorkspaceOperation.COLLECT_FILES:
                with self.backgrounds.paused():
                    self.files.restore()
                    files = self.files.collect()
                send_frame(self.client, Reply.RESULT, files)

    def _call(self, tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        try:
            values = checked(tool, arguments)
            if tool == "Bash":
                return self._bash(**values)
            if tool in ("BashOutput", "KillBash"):
                request = background.OUTPUT if tool == "BashOutput" else background.KILL
                return self._presented(self.backgrounds.tell(values["id"], request)), False
            if tool == "Grep":
                return self._grep(**values), False
            if tool == "TodoWrite":
                return "ok", False
            if tool == "NotebookEdit":
                with self.backgrounds.paused():
                    return self._notebook_edit(**values), False
            method = {"Read": "read", "Write": "write", "Edit": "edit", "MultiEdit": "multi_edit", "Glob": "glob"}[tool]
            with self.backgrounds.paused():
                return cut(getattr(self.files, method)(**values), self.limits.output_chars), False
        except ToolRefused as refused:
            return self._presented(f"error: {refused}"), True
        except ConnectionError:
            raise
        except (OSError, ValueError, RecursionError, MemoryError) as error:  # a hostile folder can cause any of these
            return self._presented(f"error: {type(error).__name__}: {error}")[:500], True

    def _bash(self, command: str, timeout: float | None = None, run_in_background: bool = False) -> tuple[str, bool]:
        if not command.strip():
            raise ToolRefused("command is empty")
        if len(command.encode(errors="replace")) > 100_000 or "\0" in command:
            raise ToolRefused("the command is too long or not text")
        if run_in_background:
            return f"started in the background as {self.backgrounds.start(command)}", False
        seconds = min(timeout or self.limits.shell_seconds, self.limits.shell_seconds)
        outcome = self.shell.run([BASH, "-c", WRAPPER, "bash", self.shell.state, command], seconds)
        changed = self.files.restore()
        notes = [outcome.killed] if outcome.killed else []
        notes += [f"{name} is protected: its content was restored" for name in changed]
        text = self._presented("\n".join([*filter(None, [outcome.output.rstrip("\n")]), *(f"[{n}]" for n in notes)]))
        failed = outcome.code != 0 or bool(outcome.killed)
        return text or (f"exit code {outcome.code}" if failed else "(no output)"), failed

    def _grep(self, pattern: str, path: str = ".", glob: str | None = None) -> str:
        base = self.files.resolve(path)
        only = [f"--include={glob}"] if glob else []
        search = ["/bin/grep", "-rnIHsE", "-D", "skip", *only, "-e", pattern, "--", base]
        with self.backgrounds.paused():
            outcome = self.shell.run(search, 5.0)
        if outcome.killed:
            raise ToolRefused(outcome.killed)
        if outcome.code > 1:
            raise ToolRefused(outcome.output.strip()[:500] or "the pattern cannot be used")
        lines = sorted(line.removeprefix("./") for line in outcome.output.splitlines())
        return self._presented("\n".join(lines)) or "(no matches)"

    def _notebook_edit(
        self, path: str, new_source: str, cell_id: str | None = None, cell_type: str | None = None,
        edit_mode: str = "replace",
    ) -> str:  # fmt: skip
        return self.files.change(path, lambda text: notebook.edited(text, new_source, cell_id, cell_type, edit_mode))

    def _presented(self, text: str) -> str:
        """Returns ``text`` as the agent may see it: ``~``, ``$TMPDIR`` and ``~/..`` replace the real paths of the
        workspace's folders. These paths are private, and they differ between runs."""
        return text.replace(self.files.root, "~").replace(f"{self.folder}/tmp", "$TMPDIR").replace(self.folder, "~/..")


_PARAMETERS: dict[str, dict[str, str]] = {  # a name that ends in "?" may be left out
    "Bash": {"command": "text", "timeout?": "a number", "run_in_background?": "true or false", "description?": "text"},
    "BashOutput": {"id": "text"},
    "KillBash": {"id": "text"},
    "Read": {"path": "text", "offset?": "an integer", "limit?": "an integer"},
    "Write": {"path": "text", "content": "text"},
    "Edit": {"path": "text", "old_string": "text", "new_string": "text", "replace_all?": "true or false"},
    "MultiEdit": {"path": "text", "edits": "edits"},
    "NotebookEdit": {
        "path": "text",
        "new_source": "text",
        "cell_id?": "text",
        "cell_type?": "text",
        "edit_mode?": "text",
    },
    "Glob": {"pattern": "text", "path?": "text"},
    "Grep": {"pattern": "text", "path?": "text", "glob?": "text"},
    "TodoWrite": {"todos": "todos"},
}


def checked(tool: str, arguments: Any, parameters: dict[str, str] | None = None) -> dict[str, Any]:
    """Returns the arguments of a call of ``tool``, converted to the types in ``parameters`` (type by parameter name).
    By default these are the parameters of ``tool``. A text such as "3" or "true" is accepted for a number or a boolean.
    Omits arguments that are None, and the argument "description". Raises ``ToolRefused`` with a message that names the
    wrong argument."""
    parameters = parameters or _PARAMETERS.get(tool)
    if parameters is None:
        raise ToolRefused(f"there is no tool {tool[:40]!r}")
    if not isinstance(arguments, dict):
        raise ToolRefused(f"{tool} needs named arguments")
    names = {name.rstrip("?"): kind for name, kind in parameters.items()}
    if unknown := sorted(map(str, arguments.keys() - names.keys())):
        raise ToolRefused(f"{tool} has no parameter {unknown[0][:40]!r}")
    if missing := [name for name in parameters if not name.endswith("?") and arguments.get(name) is None]:
        raise ToolRefused(f"{tool} needs {missing[0]}")
    values = {name: _typed(tool, name, names[name], value) for name, value in arguments.items() if value is not None}
    values.pop("description", None)
    return values


def _typed(tool: str, name: str, kind: str, value: Any) -> Any:
    if kind == "text" and isinstance(value, str):
        return value
    if kind == "true or false":
        spelled = {"true": True, "false": False}.get(value.strip().lower()) if isinstance(value, str) else value
        if isinstance(spelled, bool):
            return spelled
    if kind in ("a number", "an integer"):
        try:
            number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else -1.0
        except (ValueError, OverflowError):
            number = -1.0
        if not 0 < number < 1e9 or (kind == "an integer" and number != int(number)):
            raise ToolRefused(f"{tool}: {name} must be {kind} above zero")
        return int(number) if kind == "an integer" else number
    if kind in ("text", "true or false"):
        raise ToolRefused(f"{tool}: {name} must be {kind}")
    if not isinstance(value, list) or len(value) > 100:
        raise ToolRefused(f"{tool}: {name} must be a list")
    if kind == "edits":
        parameters = _PARAMETERS["Edit"]
        return [checked("edit", item, {k: v for k, v in parameters.items() if k != "path"}) for item in value]
    return [checked("todo", item, {"content": "text", "status": "text", "id?": "text"}) for item in value]


if __name__ == "__main__":
    main()
