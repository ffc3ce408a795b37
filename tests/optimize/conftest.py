from tests.agent.conftest import loop, sandbox  # noqa: F401
