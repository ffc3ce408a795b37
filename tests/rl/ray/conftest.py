import pytest


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Of a stage that learns by rewards, in Ray's actors or without."""
    from tests.rl.ray.ray_cases import make_inputs

    return make_inputs(tmp_path_factory.mktemp("inputs"))
