"""The examples of docs/environments.md, as they stand there."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def surroundings(*more: Path) -> dict[str, str]:
    """For a process that is to find this very source, and ``more``."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *more]))}


def blocks(heading: str) -> list[tuple[str, str]]:
    """The fenced blocks below a heading: language (may be empty) and text."""
    section = (DOCS / "environments.md").read_text().split(heading + "\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^```(\w*)\n(.*?)^```$", section, re.M | re.S)


def guides_model() -> str:
    """The model.py that the guide begins with."""
    (code,) = re.findall(r"^```python\n# model.py\n(.*?)^```$", (DOCS / "guide.md").read_text(), re.M | re.S)
    return code
