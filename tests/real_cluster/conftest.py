"""Provides the test cluster that the tests of this folder share. If it does not run yet, the tests start and stop
it."""

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import canaries
import pytest
from kubectl import Cluster, script, setting, wait_for
from release import Release, merged, release, values
from runs import Held, hold


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Yields a running cluster.  One that the tests had to start ends with the last test process that uses it."""
    cache = Path(setting("CACHE"))
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / ".tests", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        state = Path(setting("STATE"))
        running = state.is_dir()
        script("up")
        if not running:
            (state / "for-tests").touch()
        yield Cluster()
        if (state / "for-tests").exists():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # another process still uses it, and will end it
            script("down")


@pytest.fixture
def space(cluster: Cluster) -> Iterator[Cluster]:
    """Yields the cluster, bound to a new namespace with Pod Security `restricted` for this test alone."""
    name = f"test-{os.getpid()}-{time.monotonic_ns() % 10**9}"
    cluster.run("create", "namespace", name)
    cluster.run("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    here = Cluster(cluster.number, name)
    wait_for("the service account", 30, lambda: here.try_run("get", "serviceaccount", "default").returncode == 0)
    yield here
    cluster.run("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def planted() -> dict[str, str]:
    """Returns the secrets of the release that the tests share; see ``canaries``."""
    return canaries.plant()


@pytest.fixture(scope="session")
def installed(cluster: Cluster, planted: dict[str, str]) -> Iterator[Release]:
    """Yields a release of the chart with MinIO and MLflow, installed once for all tests of a process."""
    with release(cluster, f"release-{os.getpid()}", merged(values(), canaries.values(planted))) as made:
        yield made


@pytest.fixture(scope="session")
def held(installed: Release) -> Iterator[Held]:
    """Yields a suspended run (``Held``). Its sandbox servers run, and its first stage runs or has run. No other stage
    begins."""
    with hold(installed, "held") as run:
        yield run
