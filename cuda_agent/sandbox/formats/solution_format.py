"""Defines ``SolutionFormat``, which describes one form of a solution, such as a plan or a Triton module.

``table`` lists all formats. Two other modules hold dictionaries with the formats' names as keys: ``agent.skill`` for
the texts that explain a format to a model, and ``optimize.export`` for the functions that export a solution."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cuda_agent.format_names import Format
from cuda_agent.sandbox.build.builder import Builder
from cuda_agent.sandbox.wire import FormatTraits, TaskSpec

FirstPassTime = Literal["never", "before", "when refused"]


class SolutionError(ValueError):
    """A solution cannot be built. The message is for the solution's author."""


@dataclass(frozen=True)
class Toolchain:
    """The tools that build a solution. ``architecture`` is the architecture of the GPU, such as ``sm_90a``, or empty
    for the CPU."""

    builder: Builder
    architecture: str = ""

    @property
    def device(self) -> str:
        return "cuda" if self.architecture else "cpu"


Build = Callable[[Mapping[str, str], TaskSpec, Toolchain], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class SolutionFormat:
    name: Format  # for users and in the wire format
    entry: str  # the file that every solution has
    folder: str  # prefix of the paths of all other files; empty if there are none
    build: Build  # makes the worker's load request from the files; raises SolutionError, BuildError
    traits: FormatTraits
    needs: Mapping[str, str]  # packages that the exported file needs, by device
    example: tuple[tuple[str, str], ...]  # (language, path) of each file of a one-shot answer
    first_pass: Callable[[Mapping[str, str], str], FirstPassTime] = lambda files, device: "never"
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # variables of both passes, by device
    untimed: Mapping[str, str] = field(default_factory=dict)  # why solutions are not timed, by device

    def belongs(self, path: str) -> bool:
        """Returns whether the file ``path`` of the work folder is part of a solution in this format. Notes and the
        task's own files are not."""
        return path == self.entry or (self.folder != "" and path.startswith(self.folder))
