"""Passes messages between a test and the stages of its run, through files that survive a killed process.

Stages append lines to a journal, which tells the test what they really did. The test leaves orders for a stage: to fail
in some way (``misbehave``) or to wait (``hold``)."""

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
    """Returns how the test has asked the stage to misbehave in this call, or an empty string. Each call uses up one of
    the requested times."""
    path = cache / f"misbehave-{stage}"
    if not path.exists():
        return ""
    how, times = path.read_text().split()
    if int(times) > 1:
        path.write_text(f"{how} {int(times) - 1}")
    else:
        path.unlink()
    return how
