"""Untrusted text as HTML: escaped, with hidden characters named; sources and differences with colours.

Pure.  Does not: anything with templates (``page``).
"""

import re
from html import escape

from markupsafe import Markup

# Escape codes move a terminal's cursor, direction marks reorder a line, tag characters and variation selectors hide
# whole sentences, half a surrogate pair is no text at all: none of them is shown as what it does.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e01ef]"
)
_CPP = re.compile(r"[.](cpp|cc|cu|cuh|h|hpp)$")


def visible(text: str) -> str:
    """With characters that change how the rest is seen, or are not seen at all, named instead."""
    return _HIDDEN.sub(lambda found: _named(ord(found[0])), text)


def _named(code: int) -> str:
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else f"⟨U+{code:04X}⟩"


def safe(text: str) -> str:
    """Untrusted text as HTML, also inside of an attribute."""
    return escape(visible(text))


def source(path: str, text: str) -> Markup:
    """A file as HTML, coloured where it is C++ or CUDA."""
    return Markup(highlight_cpp(visible(text)) if _CPP.search(path) else safe(text))


def diff_rows(text: str) -> Markup:
    """A unified diff as HTML, a line a row."""
    return Markup("".join(_diff_row(row) for row in text.splitlines()))


def _diff_row(row: str) -> str:
    style, text = {"+": "add", "-": "del", "@": "at"}.get(row[:1]), safe(row)
    return (f'<span class="{style}">{text}</span>' if style else text) + "\n"


_TOKEN = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?(?:\*/|\Z))"
    r"|(?P<string>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
    r"|(?P<pre>^[ \t]*\#[^\n]*)"
    r"|(?P<num>\b(?:0[xX][0-9a-fA-F]+|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)[fFuUlL]*\b)"
    r"|(?P<key>\b(?:alignas|auto|break|case|const|constexpr|continue|do|else|extern|false|for|goto|if|inline|namespace|"
    r"nullptr|return|sizeof|static|struct|switch|template|true|typename|using|volatile|while|__\w+__)\b)"
    r"|(?P<type>\b(?:void|bool|char|short|int|long|float|double|unsigned|signed|half|size_t|u?int\d+_t|float[24]|dim3)\b)"
    r"|(?P<word>[A-Za-z_]\w*)",
    re.DOTALL | re.MULTILINE,
)


def highlight_cpp(source: str) -> str:
    """C++ as escaped HTML with a handful of classes.  Whatever ``source`` holds, only ``span`` elements are added."""
    out, at = [], 0
    for found in _TOKEN.finditer(source):
        out.append(escape(source[at : found.start()]))
        text, kind = found.group(), found.lastgroup
        out.append(escape(text) if kind == "word" else f'<span class="{kind}">{escape(text)}</span>')
        at = found.end()
    return "".join([*out, escape(source[at:])])
