"""Runs the fault drill of the sandbox: evaluations with all kinds of faults mixed in at random.

    python benchmarks/drill.py --evaluations 200 --seed 0 --device cpu --json drill.json [--user nobody]

Prints a table by kind of fault. Exits with 1 if a verdict is wrong, an evaluation gives no verdict, the honest
evaluation after a fault takes more than 15 s to get the right verdict, or a process or file is left behind. ``--user``
runs everything as an ordinary user, in a folder of that user. The project must then be readable for everybody.
"""

import argparse
import asyncio
import json
import os
import pwd
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.sandbox.drill import Outcome, Report, drill

PROJECT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clock", choices=("real", "model"), default="real")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--user", help="name or number of the ordinary user to run as (needs root)")
    options = parser.parse_args()
    if options.user:
        raise SystemExit(as_user(options.user, options.json))
    with tempfile.TemporaryDirectory(prefix="drill-") as home:
        os.chmod(home, 0o711)  # workers have users of their own and pass through
        for name in ("tmp", "cache"):
            Path(home, name).mkdir(mode=0o711)
        tempfile.tempdir = os.environ["TMPDIR"] = f"{home}/tmp"
        what = options.evaluations, options.seed, options.device, options.clock
        report = asyncio.run(drill(*what, Path(home, "cache")))
    if options.json:
        options.json.write_text(json.dumps(report.to_json(), indent=1))
    show(report)
    raise SystemExit(1 if report.problems() else 0)


def as_user(name: str, result: Path | None) -> int:
    """Runs this command again as the user ``name``, with a home and temporary folder that this user can write. Copies
    the results to the file ``result``, and returns the exit code."""
    user = int(name) if name.isdigit() else pwd.getpwnam(name).pw_uid
    rest = list(sys.argv[1:])
    for option in ("--user", "--json"):
        for index, word in enumerate(rest):
            if word == option:
                del rest[index : index + 2]
            elif word.startswith(f"{option}="):
                del rest[index]
    with tempfile.TemporaryDirectory(prefix="drill-user-") as home:
        os.chown(home, user, user)
        environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home}
        environment |= {"PYTHONPATH": str(PROJECT), "PYTHONDONTWRITEBYTECODE": "1"}
        command = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", "--inh-caps=-all"]
        command += [sys.executable, str(Path(__file__).resolve()), *rest, "--json", f"{home}/result.json"]
        code = subprocess.run([*opened(), *command], env=environment, cwd="/").returncode
        if result and Path(home, "result.json").exists():
            shutil.copyfile(f"{home}/result.json", result)
    return code


def opened() -> list[str]:
    """Returns a command prefix that lets an ordinary user reach the Python interpreter if it lies in root's closed
    home. The prefix starts a mount namespace in which that home holds the interpreter and nothing else. It is empty if
    every user can reach the interpreter anyway."""
    prefix = Path(sys.base_prefix)
    closed = [folder for folder in reversed(prefix.parents) if not folder.stat().st_mode & 0o001]
    if not closed:
        return []
    script = """
set -e
mount --bind "$2" /mnt
mount -t tmpfs -o mode=755 tmpfs "$1"
mkdir -p "$2"
mount --move /mnt "$2"
shift 2
exec "$@"
"""
    return ["unshare", "--mount", "sh", "-c", script, "sh", str(closed[0]), str(prefix)]


def show(report: Report) -> None:
    kinds: dict[str, list[Outcome]] = {}
    for outcome in report.outcomes:
        kinds.setdefault(outcome.kind, []).append(outcome)
    print(f"{'kind':52} {'n':>3}  {'statuses':24} {'seconds':>8} {'recovery':>9}   (worst)")
    for kind, outcomes in sorted(kinds.items()):
        statuses = ", ".join(f"{s or 'lost'} {n}" for s, n in Counter(o.status for o in outcomes).most_common())
        recoveries = [o.recovery for o in outcomes if o.recovery is not None]
        recovery = f"{max(recoveries):9.1f}" if recoveries else ""
        print(f"{kind:52} {len(outcomes):3}  {statuses:24} {max(o.seconds for o in outcomes):8.1f} {recovery}")
    sound = [o for o in report.outcomes if o.kind.startswith(("honest", "outside"))]
    recoveries = [o.recovery for o in report.outcomes if o.recovery is not None]
    where = f"{report.device}, clock {report.clock}, seed {report.seed}, user {report.user}, "
    where += f"control groups of version {report.groups}" if report.groups else "no control groups"
    print(
        f"{len(report.outcomes)} evaluations in {report.seconds:.0f} s on {where}: "
        f"{sum(o.status == 'ok' for o in sound)} of {len(sound)} honest ones ok, "
        f"recovery {statistics.median(recoveries or [0]):.1f} s (worst {max(recoveries or [0]):.1f} s)"
    )
    for problem in report.problems():
        print("  " + problem)


if __name__ == "__main__":
    main()
