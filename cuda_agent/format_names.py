"""The names of the solution formats: types, settings and the choices of the command line all derive from this list.

It imports nothing, so that the configuration, the judge and its workers can share it.  What a format does is in
``sandbox.formats.table``."""

from typing import Literal

Format = Literal["plan", "extension", "python", "triton"]
