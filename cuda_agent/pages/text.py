"""Turns untrusted text into HTML: escapes it, makes hidden characters visible, and colours source code and diffs."""

import re
from html import escape

from markupsafe import Markup
from pygments.lexers.c_like import CudaLexer
from pygments.token import Comment, Keyword, Number, String

# Escape codes move a terminal's cursor, direction marks reorder a line, tag characters and variation selectors hide
# whole sentences, half a surrogate pair is no text at all: each of these is shown by its name.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e01ef]"
)
_CPP = re.compile(r"[.](cpp|cc|cu|cuh|h|hpp)$")


def visible(text: str) -> str:
    """Returns ``text`` with a visible sign in place of each hidden character: ``␛`` for the control character U+001B,
    ``⟨U+200B⟩`` for the zero-width space.  Direction marks, which reorder other text, count as hidden.  Tabs and
    newlines stay."""

    def named(found: re.Match[str]) -> str:
        code = ord(found[0])
        return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else f"⟨U+{code:04X}⟩"

    return _HIDDEN.sub(named, text)


def safe(text: str) -> str:
    """Returns untrusted text as HTML that is safe as an element's content and as a quoted attribute's value."""
    return escape(visible(text))


def source(path: str, text: str) -> Markup:
    """Returns the file's content ``text`` as HTML, coloured if the file is C++ or CUDA."""
    return Markup(highlight_cpp(visible(text)) if _CPP.search(path) else safe(text))


def diff_rows(text: str) -> Markup:
    """Returns a unified diff as HTML.  CSS classes mark added lines, removed lines and hunk headers."""

    def shown(row: str) -> str:
        css = {"+": "add", "-": "del", "@": "at"}.get(row[:1])
        return (f'<span class="{css}">{safe(row)}</span>' if css else safe(row)) + "\n"

    return Markup("".join(map(shown, text.splitlines())))


_LONGEST_MARKED, _LONG_RUN = 50_000, re.compile(r"\s{200}")

# Kind of token -> class; the first that fits counts.
_CLASSES = (
    (Comment.Preproc, "pre"), (Comment.PreprocFile, "pre"), (Comment, "comment"), (String, "string"), (Number, "num"),
    (Keyword.Type, "type"), (Keyword, "key"),
)  # fmt: skip


def highlight_cpp(source: str) -> str:
    """Converts C++ or CUDA source code to HTML.  Escapes the code, and puts keywords, comments and other tokens into
    ``span`` elements with CSS classes.

    A very long source is only escaped.  So is a source with a long run of white space, because the lexer's time grows
    with the square of the run's length."""
    if len(source) > _LONGEST_MARKED or _LONG_RUN.search(source):
        return escape(source)
    out = []
    for _, kind, text in CudaLexer().get_tokens_unprocessed(source):
        css = next((css for known, css in _CLASSES if kind in known), "")
        out.append(f'<span class="{css}">{escape(text)}</span>' if css else escape(text))
    return "".join(out)
