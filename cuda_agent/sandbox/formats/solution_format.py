"""What a solution format is: one frozen object that says everything in which formats differ.

The objects themselves stand in ``table``.  Not covered: words for a model (``agent.skill``) and exported files
(``optimize.export``), which are tables by the format's name.
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
    """What a format builds with.  ``architecture``: of the GPU, empty on the CPU."""

    builder: Builder
    architecture: str = ""

    @property
    def device(self) -> str:
        return "cuda" if self.architecture else "cpu"


Build = Callable[[Mapping[str, str], TaskSpec, Toolchain], Awaitable[dict[str, Any]]]


def never(files: Mapping[str, str], device: str) -> FirstPassTime:
    """The first pass of a format whose solutions start no program."""
    return "never"


@dataclass(frozen=True)
class SolutionFormat:
    """One format.

    Attributes:
        name: as users and the wire format spell it.
        entry: the file that every solution has.
        folder: other files count when their path begins with this; empty where the entry is all.
        build: checks and builds the files and gives the request that the worker loads.  Raises ``SolutionError`` or
            ``BuildError``.
        traits: what the judge and its workers must know.
        needs: what the exported file needs to run, by device.
        example: language and path of the files of a one-shot answer.
        first_pass: when a solution is run where it may start programs (``first_pass``).
        environment: variables of the worker and of its first pass, by device.
        untimed: why no time is taken, by device; devices that are not named take times.
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
        """Whether a file of a work folder is part of the solution: notes, scripts and the task itself are not."""
        return path == self.entry or (self.folder != "" and path.startswith(self.folder))
