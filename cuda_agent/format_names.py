"""The names of the solution formats.  ``sandbox.formats.table`` says what each format does.

This module imports no other module of the package, so that every module can import it."""

from typing import Literal

Format = Literal["plan", "extension", "python", "triton"]
