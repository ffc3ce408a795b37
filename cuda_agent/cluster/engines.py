"""Makes the Kubernetes objects of a run's engine.

The engine consists of vLLM servers, called replicas.  All stages of the run share them.  The objects are:

    Service         gives each replica a separate address (headless)
    NetworkPolicy   lets only the run's stages and their Ray pods connect to the replicas; replicas connect to nothing
    StatefulSet     the replicas; requests are answered once the run has its first policy (``policy.engines.vllm_pool``)

With ``policy.vllm.sync=nccl``, stages and replicas may connect to each other on all ports: NCCL chooses its ports."""

from collections.abc import Mapping, Sequence
from typing import Any

from cuda_agent.cluster import pools
from cuda_agent.cluster.pools import COMPONENT_LABEL, POOL_LABEL, RUN_NAME, WORKFLOW_LABEL
from cuda_agent.config import Config
from cuda_agent.errors import ConfigError

ENGINE_PORT = 8000
FOLDER = "/engine"  # where stages and replicas mount the claim of the weights; each run has a sub-folder


def wanted(config: Config) -> bool:
    """Returns whether a run with this configuration needs engine replicas, the vLLM servers that its stages share.

    Raises:
        ConfigError: The configuration asks for something that engine replicas cannot serve."""
    vllm = config.policy.vllm
    if config.policy.engine != "vllm" or vllm.servers:
        return False
    if vllm.sync == "lora":
        why = "the profile's engines serve one base for all stages; use disk or nccl."
        raise ConfigError(f"policy.vllm.sync=lora: {why}")
    return True


def _clients(name: str) -> list[dict[str, str]]:
    """Returns labels of the pods that may connect to the engine of the Workflow ``name``: one mapping for the pods of
    stages, and one for the Ray pods of stages."""
    return [{label: name, COMPONENT_LABEL: "stage"} for label in (WORKFLOW_LABEL, POOL_LABEL)]


def engine_objects() -> list[dict[str, Any]]:
    """Returns templates of the Kubernetes objects of a run's vLLM servers, in the order of creation.  In names and
    labels, ``RUN`` stands for the name of the run's Workflow."""
    container = pools.container(
        "cuda-agent-engine",
        {"HOME": "/scratch", "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"},
        [{"name": "memory", "mountPath": "/dev/shm"}, {"name": "weights", "mountPath": FOLDER, "readOnly": True}],
        command=["python3", "-P", "-m", "cuda_agent.policy.engines.vllm_pool"],
        args=[],
        # No liveness probe: a replica answers only after the run's first policy, and exits on a failure.
        readinessProbe={"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5, "timeoutSeconds": 5},
    )
    pod = pools.pod_spec(
        "sandbox", 30, container,
        memory={"emptyDir": {"medium": "Memory"}},
        weights={"persistentVolumeClaim": {"claimName": "", "readOnly": True}},
    )  # fmt: skip
    replicas = pools.servers("engine", "engine", {COMPONENT_LABEL: "engine"}, ENGINE_PORT, pod)
    return [*pools.service_and_wall("engine", ENGINE_PORT, pools.peers(*_clients(RUN_NAME))), replicas]


def objects(base: Sequence[Mapping[str, Any]], workflow: str, uid: str, config: Config) -> list[dict[str, Any]]:
    """Returns the engine's objects for one run, filled with the run's values.  ``base`` has templates of the objects
    from the chart.  ``workflow`` and ``uid`` are the name and the UID of the run's Workflow."""
    policy = config.policy
    opened: list[dict[str, Any]] = []
    if policy.vllm.sync == "nccl":
        (wall,) = (item["spec"] for item in base if item["kind"] == "NetworkPolicy")
        for suffix, labels in zip(("stages", "ray"), _clients(RUN_NAME), strict=True):
            replicas = [{"podSelector": wall["podSelector"]}]
            rules = [{"from": replicas}], [{"to": replicas}]
            own = pools.labels_of("engine")
            opened.insert(0, pools.network_policy(f"{RUN_NAME}-engine-{suffix}", own, labels, *rules))
    made = pools.of_run([*opened, *base], workflow, uid)
    for item in made:
        if item["kind"] == "StatefulSet":
            (container,) = item["spec"]["template"]["spec"]["containers"]
            container["args"] = [
                f"{FOLDER}/{workflow}", f"--port={ENGINE_PORT}", f"--context={policy.context}",
                f"--batch={policy.engine_batch}", f"--memory={policy.vllm.gpu_memory}", f"--threads={policy.threads}",
            ]  # fmt: skip
        if opened and item["metadata"]["name"] == f"{workflow}-engine" and item["kind"] == "NetworkPolicy":
            clients = pools.peers(*_clients(workflow))
            item["spec"] |= {"ingress": [{"from": clients}], "egress": [{"to": clients}]}
    return made


def names(workflow: str) -> list[tuple[str, str]]:
    """Returns (kind, name) of every object that a run's engine can have."""
    walls = [("NetworkPolicy", f"{workflow}-engine-{suffix}") for suffix in ("stages", "ray")]
    return [*((kind, f"{workflow}-engine") for kind in ("StatefulSet", "Service", "NetworkPolicy")), *walls]
