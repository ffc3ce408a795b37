"""The names of the solution formats.  Configuration, command line and messages to the judge take the names from here.

The module imports no other module of the package, so that the configuration, the judge and its workers can all import
it.  ``sandbox.formats.table`` says what each format does."""

from typing import Literal

Format = Literal["plan", "extension", "python", "triton"]
