import os

import pytest

from tests import made_once


@pytest.fixture(scope="session", autouse=True)
def _made_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.getbasetemp()
    made_once.keep_in((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "made-once")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: nothing else is left to do beside it at the end."""
    items.sort(key=lambda item: "/test_smoke.py::" not in item.nodeid)
