"""Renders templates as HTML pages.  The pages are safe to open, although they show untrusted text, such as kernels.

A page loads no other files.  Its content security policy allows at most one script: an inline script that the policy
identifies by its hash.  Templates escape all text, and replace each character that hides or reorders text with the
character's name.  Only text of the type ``Markup``, which is safe HTML already, stays unchanged."""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cuda_agent.pages import charts
from cuda_agent.pages.text import diff_rows, source, visible


def plural(count: int, one: str) -> str:
    return f"{count} {one}{'' if count == 1 else 's'}"


def slug(text: str) -> str:
    """Returns the text in a form that can be part of a CSS class name: in lower case, with a dash in place of each
    character that is not an ASCII letter or digit."""
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower())


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("cuda_agent.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    own = (source, diff_rows, plural, slug)
    shared = (charts.number, charts.share, charts.factor, charts.duration, charts.clock_time)
    environment.globals.update({function.__name__: function for function in (*own, *shared)})
    return environment


def part(template: str, **values: Any) -> Markup:
    """Returns the HTML of a template for a part of a page.  ``values`` are the template's variables."""
    return Markup(_environment().get_template(template).render(**values))


def page(template: str, styles: Sequence[str] = (), script: str = "", **values: Any) -> str:
    """Returns a whole page as HTML.

    Args:
        template: The name of a template that extends ``page.html.j2``.
        styles: Names of CSS files in this package.  The page has their rules after those of ``report.css``.
        script: Name of the file in this package that holds the page's only script; empty: no script.
        values: The variables of the template."""
    folder = files("cuda_agent.pages")
    code = (folder / script).read_text() if script else ""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    if code:
        policy += f"; script-src 'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
    style = Markup("".join((folder / name).read_text() for name in ("report.css", *styles)))
    return part(template, style=style, script=Markup(code), policy=Markup(policy), **values)
