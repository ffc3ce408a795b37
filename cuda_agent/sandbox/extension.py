"""The extension lane (being built)."""

from typing import Any


class ExtensionError(ValueError):
    """What is wrong with the work folder: for its author."""


async def prepare(files: dict[str, str], spec: Any, builder: Any) -> tuple[dict[str, Any], list[str]]:
    raise ExtensionError("the extension lane is not available yet")
