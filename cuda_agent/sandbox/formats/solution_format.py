"""The type of a solution format: one frozen object that holds every difference between formats.

``table`` lists the formats.  Not covered: prompt texts (``agent.skill``) and exported files (``optimize.export``),
which are tables by the format's name.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cuda_agent.format_names import Format
from cuda_agent.sandbox.build.builder import Builder
from cuda_agent.sandbox.wire import FormatTraits, TaskSpec

FirstPassTime = Literal["never", "before", "when refused"]


class SolutionError(ValueError):
    """A solution that cannot be built; the message is for its author."""


@dataclass(frozen=True)
class Toolchain:
    """The builder and device that a format builds for.  ``architecture``: the GPU's, empty on the CPU."""

    builder: Builder
    architecture: str = ""

    @property
    def device(self) -> str:
        return "cuda" if self.architecture else "cpu"


Build = Callable[[Mapping[str, str], TaskSpec, Toolchain], Awaitable[dict[str, Any]]]


def never(files: Mapping[str, str], device: str) -> FirstPassTime:
    """Returns the first pass of a format whose solutions start no program."""
    return "never"


@dataclass(frozen=True)
class SolutionFormat:
    """One format.

    Attributes:
        name: The name for users and in the wire format.
        entry: The file that every solution has.
        folder: Prefix of the paths of all other files; empty where the entry is the only file.
        build: Checks and builds the files and returns the worker's load request.  Raises ``SolutionError`` or
            ``BuildError``.
        traits: Traits for the judge and its workers.
        needs: Requirements of the exported file, by device.
        example: Language and path of the files of a one-shot answer.
        first_pass: When a solution runs in a worker that may start programs (``first_pass``).
        environment: Environment variables of the worker and its first pass, by device.
        untimed: Why solutions are not timed, by device; on other devices they are.
    """

    name: Format
    entry: str
    folder: str
    build: Build
    traits: FormatTraits
    needs: Mapping[str, str]
    example: tuple[tuple[str, str], ...]
    first_pass: Callable[[Mapping[str, str], str], FirstPassTime] = never
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    untimed: Mapping[str, str] = field(default_factory=dict)

    def belongs(self, path: str) -> bool:
        """Returns whether a file of a work folder is part of the solution; notes, scripts and the task are not."""
        return path == self.entry or (self.folder != "" and path.startswith(self.folder))
