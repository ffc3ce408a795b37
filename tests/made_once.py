"""What the sandbox makes once a machine, made once for all tests: the precompiled headers of g++ and of torch.compile.

They lie in the cache by their content, so that a test's own cache may share them with others and nothing else.
"""

from pathlib import Path

_PARTS = ("builds/prelude", "inductor")
_place: Path | None = None


def keep_in(place: Path) -> None:
    global _place
    _place = place


def share(cache: Path) -> Path:
    """``cache``, for a sandbox that is not there yet."""
    assert _place is not None, "tests/conftest.py says where"
    for part in _PARTS:
        (_place / part).mkdir(parents=True, exist_ok=True)
        link = cache / "sandbox" / part
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(_place / part)
    return cache
