"""Parses Python sources."""

import ast
from typing import Any

_TRIES = 3


def parse(code: str) -> ast.Module:
    """Returns the syntax tree of a module, as ``ast.parse`` does.

    CPython 3.11 counts the depth of a tree for all threads together. While another thread parses code, CPython may
    therefore raise ``SystemError`` for valid code. This function then tries again.

    Raises:
        SyntaxError: ``code`` is not valid Python.
        ValueError: ``code`` holds a null byte, or every try raised ``SystemError``.
        RecursionError: ``code`` is nested too deep.
        MemoryError: ``code`` is nested too deep."""
    return _parsed(code, "exec")


def parse_expression(code: str) -> ast.expr:
    """Returns the syntax tree of an expression. Raises as ``parse`` does."""
    return _parsed(code, "eval").body


def _parsed(code: str, mode: str) -> Any:
    for _ in range(_TRIES):
        try:
            return ast.parse(code, mode=mode)
        except SystemError as error:
            failure = error
    raise ValueError(f"cannot be parsed: {failure}")
