"""The environment of the templates: everything is escaped, and a name that is missing is an error."""

import re
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

from cuda_agent.pages import page

TEMPLATES = sorted((Path(page.__file__).parent / "templates").glob("*.j2"))


def shown(template, **values):
    return page._environment().from_string(template).render(**values)


def test_text_is_escaped_and_hidden_characters_are_named():
    assert shown('<a title="{{ x }}">', x="\"'<&") == '<a title="&#34;&#39;&lt;&amp;">'
    assert shown("{{ x }} {{ x ~ 'b' }}", x="\u202ea\x1b") == "⟨U+202E⟩a␛ ⟨U+202E⟩a␛b"
    assert shown("{{ source('a.cu', x) }}{{ diff_rows(x) }}", x="+<b>\x1b").count("&lt;b&gt;␛") == 2


def test_a_missing_value_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="'x' is undefined"):
        shown("{{ x }}")


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_no_template_switches_escaping_off_and_every_attribute_is_quoted(path):
    text = path.read_text()
    assert not re.search(r"\|\s*safe\b|autoescape|Markup", text)
    assert not re.search(r"=\s*\{\{", text), "a value of an attribute without quotes"
    assert page._environment().get_template(path.name)


def test_asking_for_help_loads_no_templates():
    code = "import sys; from cuda_agent.cli import main; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
