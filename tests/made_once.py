"""Shares between all tests what the sandbox makes once per machine: precompiled headers of g++ and of torch.compile.

The cache stores them under a hash of what they are made from. The caches of several tests can therefore share them and
nothing else."""

from pathlib import Path

_PARTS = ("builds/prelude", "inductor")
_place: Path | None = None


def keep_in(place: Path) -> None:
    global _place
    _place = place


def share(cache: Path) -> Path:
    """Links the shared files into ``cache``, the cache of a sandbox that starts later, and returns ``cache``."""
    assert _place is not None, "tests/conftest.py says where"
    for part in _PARTS:
        (_place / part).mkdir(parents=True, exist_ok=True)
        link = cache / "sandbox" / part
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(_place / part)
    return cache
