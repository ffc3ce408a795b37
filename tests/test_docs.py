import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_table_of_contents_names_every_decision_once_and_in_order():
    text = (DOCS / "decisions.md").read_text()
    headings = re.findall(r"^### (D\d+\. .+)$", text, re.M)
    assert re.findall(r"^- \[(D\d+\. .+)\]\(#", text, re.M) == headings
    assert len({heading.partition(".")[0] for heading in headings}) == len(headings)


def test_pictures_and_pages_that_the_docs_link_exist():
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert target.startswith(("http://", "https://")) or (DOCS / target).exists(), (page.name, target)
