import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import made_once

# On a machine that does other things too, no example has a limit of its own.  The examples are the same each time: who
# looks for new ones says --hypothesis-profile=new.
for name, same in (("same", True), ("new", False)):
    too_slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile(name, deadline=None, derandomize=same, suppress_health_check=too_slow)
hypothesis.settings.load_profile("same")

gc.disable()  # while everything is imported, which stays


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _made_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.getbasetemp()
    made_once.keep_in((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "made-once")


@pytest.fixture(autouse=True)
def _denormals_stay_on() -> Iterator[None]:
    """Fails the test that turns them off for all later ones, as by loading a library linked with -ffast-math."""
    yield
    assert sys.float_info.min / 2 > 0, "this test turned off denormals in this process"


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yields a running sandbox (``Running``) on the GPU. Skips the test without a GPU."""
    from cuda_agent.config import SandboxConfig
    from cuda_agent.sandbox import driver
    from tests.sandbox.conftest import Running  # no other test needs these imports

    try:
        driver.open_device()
    except driver.NoDevice:
        pytest.skip("no GPU")
    running = Running(SandboxConfig(device="cuda", memory_mb=4096), tmp_path_factory.mktemp("cuda"))
    yield running
    running.close()


# What takes longest, in order, in `make test` or `make test-drills`.  Both give a process whole files, so that the
# servers, sandboxes and control planes of a file start once; a long one that began late would be worked on alone.
LONGEST = (
    "pipeline/test_smoke.py",
    "exploits/test_exploits.py",
    "cluster/test_submit.py",
    "sandbox/service/test_service.py",
    "sandbox/test_faults.py",
    "rl/ray/test_ray.py",
    "sandbox/judge/test_verdicts.py",
    "training/test_ranks.py",
    "deploy/test_chart.py",
    "sandbox/test_drill.py",
    "sandbox/test_remote.py",
    "training/test_memory.py",
    "optimize/test_search.py",
    "optimize/test_export.py",
    "cluster/test_pod.py",
    "cluster/test_rayjobs.py",
    "stages/test_stages.py",
    "sandbox/service/test_load.py",
    "exploits/test_walls.py",
    "pipeline/test_executor.py",
    "cluster/test_results.py",
    "optimize/test_injection.py",
    "sandbox/judge/timing/test_roofline.py",
    "sandbox/formats/test_first_pass.py",
    "cli/test_main.py",
)


@pytest.hookimpl(tryfirst=True)  # before marks are chosen by
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "plane" in getattr(item, "fixturenames", ()):  # a real API server, one of the test cluster's programs
            item.add_marker("cluster")
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))
