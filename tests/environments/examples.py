"""Reads the examples of docs/environments.md."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def surroundings(*more: Path) -> dict[str, str]:
    """Returns an environment for a process that imports this checkout's modules, and those in the folders ``more``. The
    process keeps its cache in the folder that it runs in."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *more])), "CUDA_AGENT_HOME": "home"}


def blocks(heading: str) -> list[tuple[str, str]]:
    """Returns the fenced blocks below a heading: the language (may be empty) and the text of each."""
    section = (DOCS / "environments.md").read_text().split(heading + "\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^```(\w*)\n(.*?)^```$", section, re.M | re.S)


def guides_model() -> str:
    """Returns the model.py with which the guide begins."""
    (code,) = re.findall(r"^```python\n# model.py\n(.*?)^```$", (DOCS / "guide.md").read_text(), re.M | re.S)
    return code
