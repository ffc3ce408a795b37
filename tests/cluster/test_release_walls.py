"""What stands between a run and the rest of a cluster, tried on a live run of an installed release.

Every test tries the same thing once more with the wall taken away, and then it succeeds.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import probing
import pytest
from canaries import leaks, open_bucket
from kubectl import Cluster, pod, wait_for
from release import Release
from runs import Held

pytestmark = pytest.mark.cluster

NAME = "app.kubernetes.io/name"
IMAGE = "localhost/cuda-agent-sandbox"


def labels(held: Held, component: str, **more: str) -> dict[str, str]:
    """Of a pod of this release."""
    return {NAME: "cuda-agent", "app.kubernetes.io/instance": "cuda-agent", "app.kubernetes.io/component": component} | {
        key.replace("__", "/"): value for key, value in more.items()
    }


def started(space: Cluster, *pods: dict[str, Any]) -> None:
    space.create(*pods)
    space.ready(*(item["metadata"]["name"] for item in pods))
