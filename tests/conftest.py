import gc
import os
from pathlib import Path

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


# What takes longest, in order.  `make test` gives a process whole files, so that the servers, sandboxes and control
# planes of a file start once; a long one that began late would be worked on alone.
LONGEST = (
    "pipeline/test_smoke.py",
    "sandbox/exploits/test_exploits.py",
    "pipeline/test_cluster.py",
    "sandbox/test_service.py",
    "sandbox/test_faults.py",
    "stages/test_ray.py",
    "sandbox/test_verdicts.py",
    "training/test_ranks.py",
    "pipeline/test_chart.py",
    "sandbox/test_drill.py",
    "sandbox/test_remote.py",
    "training/test_memory.py",
    "pipeline/test_optimize.py",
    "agent/test_export.py",
    "pipeline/test_pod.py",
    "pipeline/test_rayjobs.py",
    "stages/test_stages.py",
    "sandbox/test_service_load.py",
    "sandbox/exploits/test_walls.py",
    "pipeline/test_executor.py",
    "pipeline/test_cluster_report.py",
    "pipeline/test_optimize_injection.py",
    "sandbox/test_roofline.py",
    "sandbox/test_first_pass.py",
    "pipeline/test_cli.py",
)


@pytest.hookimpl(tryfirst=True)  # before marks are chosen by
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "plane" in getattr(item, "fixturenames", ()):  # a real API server, one of the test cluster's programs
            item.add_marker("cluster")
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))
