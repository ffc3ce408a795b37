import re
import runpy
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.optimize import quirks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_the_table_of_contents_names_every_decision_once_and_in_order():
    text = (DOCS / "decisions.md").read_text()
    headings = re.findall(r"^### (D\d+\. .+)$", text, re.M)
    assert re.findall(r"^- \[(D\d+\. .+)\]\(#", text, re.M) == headings
    assert len({heading.partition(".")[0] for heading in headings}) == len(headings)


def test_every_page_is_on_the_site():
    """Links are checked (`make lint`) on the pages of the site."""
    pages = {
        path.relative_to(ROOT).as_posix()
        for folder in (".", "docs", "examples")
        for path in ROOT.glob(f"{folder}/*.md")
    }
    assert pages | {"charts/cuda-agent/README.md"} == set(runpy.run_path(str(DOCS / "conf.py"))["include_patterns"])


def test_no_file_holds_the_marks_of_a_merge():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "conf").rglob("*.yaml")]
    assert len(pages) > 30
    marks = re.compile(r"^(<{7}|>{7}) ", re.M)
    assert not [path.name for path in pages if marks.search(path.read_text())]


def test_the_page_of_servers_names_every_imitated_deviation():
    cases = re.findall(r"^\| [^|]+ \| ([^|]+) \|$", (DOCS / "servers.md").read_text(), re.M)  # tables of two columns
    named = re.findall(r"`([\w-]+)`", " ".join(cases))
    servers = re.findall(r'^    "([\w-]+)": ', (ROOT / "tests/optimize/test_quirks.py").read_text(), re.M)
    assert sorted(named) == sorted([*servers, *quirks.WAYS, *quirks.ALONE])


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_badges_say_what_the_package_says(project):
    python, licence = ((DOCS / f"pictures/badge-{name}.svg").read_text() for name in ("python", "licence"))
    assert f">{project['requires-python'].removeprefix('>=')}+<" in python and f">{project['license']}<" in licence


def test_the_citation_is_of_this_version(project):
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (str(cited["version"]), cited["license"]) == (project["version"], project["license"])
    assert cited["title"] == project["name"] and cited["cff-version"] == "1.2.0"
