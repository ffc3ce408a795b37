import pytest


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Returns the input folders of a stage that learns from rewards."""
    from tests.rl.ray.ray_cases import make_inputs

    return make_inputs(tmp_path_factory.mktemp("inputs"))
