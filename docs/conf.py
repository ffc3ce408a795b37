"""Settings of the documentation site. Sphinx reads the repository's pages in place, so links work on the site as they
do between the files. ``make docs`` builds it; ``make lint`` only reads the pages, and fails on a dead link."""

from typing import Any

PAGES = {
    "Using it": [
        "docs/guide", "docs/optimize", "docs/servers", "docs/api", "docs/reference", "examples/README", "docs/faq",
    ],
    "Training": ["docs/concepts", "docs/training", "docs/environments", "docs/engines", "docs/ray", "docs/kernels"],
    "Platforms": ["docs/security", "docs/service", "docs/cluster", "docs/operations", "charts/cuda-agent/README"],
    "The project": [
        "docs/comparison", "docs/architecture", "CONTRIBUTING", "SECURITY", "docs/cluster-development",
        "docs/decisions", "docs/lab-notebook", "CHANGELOG",
    ],
}  # fmt: skip

project = "cuda-agent"
root_doc = "README"
include_patterns = [f"{page}.md" for pages in [["README"], *PAGES.values()] for page in pages]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
autodoc_class_signature = "separated"  # no list of a dataclass's fields before the fields
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
html_theme = "furo"
html_title = "cuda-agent"
html_copy_source = False
pygments_style = "friendly"


def add_contents(app: Any, page: str, text: list[str]) -> None:
    """Appends the table of contents to the home page, which is the README."""
    if page == root_doc:
        for caption, pages in PAGES.items():
            lines = ["", "```{toctree}", ":hidden:", f":caption: {caption}", *(f"/{page}" for page in pages), "```", ""]
            text[0] += "\n".join(lines)


def setup(app: Any) -> None:
    app.connect("source-read", add_contents)
