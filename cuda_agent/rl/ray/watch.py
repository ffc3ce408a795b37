"""Ends what is left of a stage's own Ray, and removes its folder: ``python ray_watch.py FOLDER`` with a pipe as stdin.

It waits for the end of the pipe, which is the end of the stage, however that came.  Ray's own processes find out by
themselves only in part: agents of a node that was killed go on for minutes.  A process belongs to the folder when it
has a file of it open, as all of Ray's do: their logs.

Standard library only, and no package: it runs beside a stage for as long as that lives.
"""

import contextlib
import os
import shutil
import signal
import sys
import time

SECONDS = 20.0  # at most, for those that the kernel is slow to end


def holders(folder: str, stage: int) -> list[int]:
    """Processes of this user that have a file below ``folder`` open; the stage's own, where it goes on, is spared."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (os.getpid(), stage):
            with contextlib.suppress(OSError):  # it ended, or belongs to somebody else
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
