import pytest
from optimizing import Run, SharedSandbox

from tests import made_once
from tests.agent.conftest import loop, sandbox  # noqa: F401


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder for baselines, builds and verdicts; baselines are made once for all modules."""
    return made_once.share(tmp_path_factory.mktemp("optimize") / "cache")


@pytest.fixture(scope="module")
def shared(cache):
    """One sandbox for the tests of a module."""
    shared = SharedSandbox(cache)
    yield shared
    shared.close()


@pytest.fixture
def run(tmp_path, shared):
    """Runs a search in ``tmp_path``, with the sandbox that a module's tests share."""
    return Run(tmp_path, shared.cache, shared=shared)
