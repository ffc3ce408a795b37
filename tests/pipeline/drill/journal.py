"""Tells a test what the stages really did: they append lines to a file that survives kills.  Also holds the orders that
a test leaves for a stage (``misbehave``)."""

from pathlib import Path


def write(cache: Path, line: str) -> None:
    with open(cache / "journal.txt", "a") as file:
        file.write(line + "\n")


def read(cache: Path) -> list[str]:
    path = cache / "journal.txt"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def misbehave(cache: Path, stage: str, how: str, times: int = 1) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    (cache / f"misbehave-{stage}").write_text(f"{how} {times}")


def hold(cache: Path, held: bool = True) -> None:
    """Makes the stage ``report`` wait; with ``held=False`` lets it go on."""
    (cache / "hold").touch() if held else (cache / "hold").unlink()


def held(cache: Path) -> bool:
    return (cache / "hold").exists()


def asked(cache: Path, stage: str) -> str:
    """Returns how a test has asked the stage to misbehave this time; empty if no test has."""
    path = cache / f"misbehave-{stage}"
    if not path.exists():
        return ""
    how, times = path.read_text().split()
    if int(times) > 1:
        path.write_text(f"{how} {int(times) - 1}")
    else:
        path.unlink()
    return how
