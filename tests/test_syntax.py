"""Parsing despite a fault of CPython 3.11."""

import ast
from typing import Any

import pytest

from cuda_agent import syntax


def test_a_systemerror_of_the_parser_is_tried_again_and_is_no_systemerror_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, faults = ast.parse, [1]

    def parse(code: str, **more: Any) -> Any:
        if faults:
            faults.pop()
            raise SystemError("AST constructor recursion depth mismatch (before=189, after=244)")
        return real(code, **more)

    monkeypatch.setattr(ast, "parse", parse)
    assert ast.unparse(syntax.parse("x = 1")) == "x = 1"
    faults += [1] * 9
    with pytest.raises(ValueError, match="cannot be parsed: AST constructor"):
        syntax.parse("x = 1")


@pytest.mark.parametrize("code", ["x = ", "x = '\0'"])
def test_invalid_code_raises_what_ast_raises(code: str) -> None:
    with pytest.raises((SyntaxError, ValueError)) as wanted:
        ast.parse(code)
    with pytest.raises(wanted.type):
        syntax.parse(code)
