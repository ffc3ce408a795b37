import pytest
from optimizing import Run

from tests.agent.conftest import loop, sandbox  # noqa: F401


@pytest.fixture
def run(tmp_path, shared):
    """Runs a search in ``tmp_path``, with the sandbox that a module's tests share."""
    return Run(tmp_path, shared.cache, shared=shared)
