"""What all our HTML pages share: the document around their sections, and untrusted text as text.

Pure.  A page loads nothing and runs nothing but the one script that it was made with, whose hash its policy names.
Whatever tasks, models and tools wrote goes through ``safe``, ``source`` or ``diff_rows``.

Does not: charts (``report_charts``), or what a page says.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from cuda_agent.pages.charts import highlight_cpp

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


def source(path: str, text: str) -> str:
    """A file as HTML, coloured where it is C++ or CUDA."""
    text = visible(text)
    return highlight_cpp(text) if _CPP.search(path) else escape(text)


def diff_rows(text: str) -> str:
    """A unified diff as HTML, a line a row."""
    return "".join(_diff_row(row) for row in text.splitlines())


def _diff_row(row: str) -> str:
    style = {"+": "add", "-": "del", "@": "at"}.get(row[:1])
    return (f'<span class="{style}">{safe(row)}</span>' if style else safe(row)) + "\n"


def style_sheet(*names: str) -> str:
    """The report's style, then that of each file."""
    return "".join((files("cuda_agent.pages") / name).read_text() for name in ("report.css", *names))


def document(
    title: str,
    head: str,
    sections: Sequence[tuple[str, str, str]],
    footer: str,
    style: str,
    skip: str,
    script: str = "",
) -> str:
    """The whole page.  ``sections``: (id, title, HTML); ``title`` is text, the rest HTML; ``skip``: what the link to
    the first section leads to, in words."""
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading, _ in sections)
    contents = f'<nav aria-label="Sections"><ol>{links}</ol></nav>' if len(sections) > 1 else ""
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{heading}</h2>{content}</section>'
        for name, heading, content in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">'
        f"<title>{safe(title)}</title><style>{style}</style></head><body>"
        f'<a class="skip" href="#{sections[0][0]}">Skip to {skip}</a><header>{head}</header>'
        f"{contents}<main>{body}</main>"
        f"<footer>{footer}</footer>{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )


def _policy(script: str) -> str:
    parts = ["default-src 'none'", "style-src 'unsafe-inline'", "base-uri 'none'", "form-action 'none'"]
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        parts.append(f"script-src 'sha256-{digest}'")
    return "; ".join(parts)
