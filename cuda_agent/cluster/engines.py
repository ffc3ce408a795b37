"""The engine replicas of a run as Kubernetes objects: vLLM servers that all stages of the run share.

    Service         headless: an address for each replica
    NetworkPolicy   in: from this run's stages and the pods of their Ray; out: nothing, not even DNS
    StatefulSet     the replicas, which wait for the run's first policy (``policy.engines.vllm_pool``)

With ``policy.vllm.sync=nccl`` stages and replicas also reach the other ports of each other, which NCCL chooses.  The
run's Workflow owns all objects.  As in ``pools``, the objects are data with ``RUN`` as a placeholder for the Workflow's
name; for each profile the chart merges image, resources, node placement and the claim of the weights into them.

What it does not cover: the servers (``policy.engines.vllm_pool``), and LoRA adapters, whose base model would have to be
present before the stage that trains them.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from cuda_agent.cluster import pools
from cuda_agent.cluster.pools import (
    COMPONENT_LABEL,
    CONTAINER_SECURITY,
    NAME_LABEL,
    POOL_LABEL,
    RUN_NAME,
    WORKFLOW_LABEL,
)
from cuda_agent.config import Config
from cuda_agent.errors import ConfigError

ENGINE_PORT = 8000
FOLDER = "/engine"  # where stages and replicas mount the claim of the weights; each run has a sub-folder
_LABELS = {NAME_LABEL: "cuda-agent", COMPONENT_LABEL: "engine", POOL_LABEL: RUN_NAME}


def wanted(config: Config) -> bool:
    """Whether a run needs engine replicas.

    Raises:
        ConfigError: The configuration asks for something that replicas cannot serve.
    """
    vllm = config.policy.vllm
    if config.policy.engine != "vllm" or vllm.servers:
        return False
    if vllm.sync == "lora":
        raise ConfigError(
            "policy.vllm.sync=lora: the profile's engines serve one base for all stages; use disk or nccl."
        )
    return True


def _stages(name: str) -> list[dict[str, Any]]:
    """Selectors of the pods of a run that may send requests: its stages, and the pods of a stage's Ray."""
    return [
        {"podSelector": {"matchLabels": {label: name, COMPONENT_LABEL: "stage"}}}
        for label in (WORKFLOW_LABEL, POOL_LABEL)
    ]


def engine_objects() -> list[dict[str, Any]]:
    """The objects without a profile and a run, in the order of creation."""
    own = {POOL_LABEL: RUN_NAME, COMPONENT_LABEL: "engine"}
    service = pools.headless_service(f"{RUN_NAME}-engine", _LABELS, own, ENGINE_PORT)
    ingress = [pools.from_to(_stages(RUN_NAME), ENGINE_PORT)]
    policy = pools.network_policy(f"{RUN_NAME}-engine", _LABELS, own, ingress, [])
    container = {
        "name": "engine",
        "image": f"cuda-agent-engine:{version('cuda-agent')}",
        "command": ["python3", "-P", "-m", "cuda_agent.policy.engines.vllm_pool"],
        "args": [],
        "env": [
            {"name": "HOME", "value": "/scratch"},
            {"name": "HF_HUB_OFFLINE", "value": "1"},
            {"name": "VLLM_SERVER_DEV_MODE", "value": "1"},
            {"name": "VLLM_NO_USAGE_STATS", "value": "1"},
        ],
        "ports": [{"name": "http", "containerPort": ENGINE_PORT, "protocol": "TCP"}],
        # No liveness probe: a replica answers only after the run's first policy, and exits if it breaks.
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5, "timeoutSeconds": 5},
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            *pools.SCRATCH_MOUNTS,
            {"name": "memory", "mountPath": "/dev/shm"},
            {"name": "weights", "mountPath": FOLDER, "readOnly": True},
        ],
    }
    volumes: dict[str, dict[str, Any]] = {
        "memory": {"emptyDir": {"medium": "Memory"}},
        "weights": {"persistentVolumeClaim": {"claimName": "", "readOnly": True}},
    }
    replicas = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": f"{RUN_NAME}-engine", "labels": _LABELS},
        "spec": {
            "replicas": 1,
            "podManagementPolicy": "Parallel",
            "serviceName": f"{RUN_NAME}-engine",
            "selector": {"matchLabels": own},
            "template": {"metadata": {"labels": _LABELS}, "spec": pools.pod_spec("sandbox", 30, container, volumes)},
        },
    }
    return [service, policy, replicas]


def objects(base: Sequence[Mapping[str, Any]], workflow: str, uid: str, config: Config) -> list[dict[str, Any]]:
    """The objects of one run, ready to be created."""
    made = [pools.named(dict(item), workflow) for item in base]
    policy = config.policy
    for item in made:
        if item["kind"] == "StatefulSet":
            (container,) = item["spec"]["template"]["spec"]["containers"]
            container["args"] = [
                f"{FOLDER}/{workflow}", f"--port={ENGINE_PORT}", f"--context={policy.context}",
                f"--batch={policy.engine_batch}", f"--memory={policy.vllm.gpu_memory}", f"--threads={policy.threads}",
            ]  # fmt: skip
    if policy.vllm.sync == "nccl":
        (wall,) = (item for item in made if item["kind"] == "NetworkPolicy")
        replicas = {"podSelector": wall["spec"]["podSelector"]}
        wall["spec"] |= {"ingress": [{"from": _stages(workflow)}], "egress": [{"to": _stages(workflow)}]}
        for suffix, peer in zip(("stages", "ray"), _stages(workflow), strict=True):
            opened = pools.network_policy(
                f"{workflow}-engine-{suffix}", _LABELS, peer["podSelector"]["matchLabels"],
                [{"from": [replicas]}], [{"to": [replicas]}],
            )  # fmt: skip
            made.insert(0, pools.named(opened, workflow))
    owner = pools.owned_by(workflow, uid)
    for item in made:
        item["metadata"]["ownerReferences"] = [owner]
    return made


def addresses(made: Sequence[Mapping[str, Any]]) -> list[str]:
    """The address of every replica, for ``policy.vllm.servers``."""
    return pools.addresses(made, ENGINE_PORT)


def names(workflow: str) -> list[tuple[str, str]]:
    """Kind and name of every object that a run may have, servers first."""
    found = [(kind, f"{workflow}-engine") for kind in ("StatefulSet", "Service", "NetworkPolicy")]
    return [*found, *(("NetworkPolicy", f"{workflow}-engine-{suffix}") for suffix in ("stages", "ray"))]
