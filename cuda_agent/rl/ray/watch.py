"""Ends the remaining processes of a stage's Ray instance and removes the instance's folder: ``python watch.py FOLDER``.

Without this program some of Ray's processes would outlive the stage by minutes. The program's stdin is a pipe from the
stage. The pipe closes when the stage ends, and the program waits until then. A process belongs to the instance if it
has a file in FOLDER open, such as its log. The program imports only the standard library, because it stays in memory
during the stage."""

import contextlib
import os
import shutil
import signal
import sys
import time

SECONDS = 20.0  # longest wait for processes that end slowly


def holders(folder: str, stage: int) -> list[int]:
    """Returns the ids of all processes, except this one and ``stage``, that have a file below ``folder`` open."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (os.getpid(), stage):
            with contextlib.suppress(OSError):  # the process ended, or belongs to another user
                opened = (os.readlink(f"/proc/{name}/fd/{number}") for number in os.listdir(f"/proc/{name}/fd"))
                if any(path.startswith(folder + os.sep) for path in opened):
                    found.append(int(name))
    return found


def main(folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    stage = os.getppid()
    while os.read(0, 4096):
        pass
    end = time.monotonic() + SECONDS
    while (left := holders(folder, stage)) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
