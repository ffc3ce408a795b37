"""Makes the Kubernetes objects of a run's engine: the vLLM servers with which the run's stages generate text.

All stages of the run share these servers, called replicas.  The objects are:

    Service         gives each replica a separate address (headless)
    PodDisruptionBudget   says how many replicas may be evicted at once
    NetworkPolicy   lets only the run's stages and their Ray pods connect to the replicas; replicas connect to nothing
    StatefulSet     the replicas; each waits until a stage writes the first policy (language model), and then serves it

With the setting ``policy.vllm.sync=nccl``, stages send new weights to the replicas through NCCL.  NCCL uses no fixed
ports, so the NetworkPolicies then let stages and replicas connect to each other on all ports."""

from collections.abc import Mapping, Sequence
from typing import Any

from cuda_agent.cluster import pools
from cuda_agent.cluster.pools import COMPONENT_LABEL, POOL_LABEL, RUN_NAME, WORKFLOW_LABEL
from cuda_agent.config import Config
from cuda_agent.errors import ConfigError

ENGINE_PORT = 8000
FOLDER = "/engine"  # where stages and replicas mount the claim of the weights; each run has a sub-folder


def wanted(config: Config) -> bool:
    """Returns whether a run with this configuration needs engine replicas (vLLM servers that its stages share).

    Raises:
        ConfigError: ``policy.vllm.sync`` is ``lora``, which engine replicas cannot serve."""
    vllm = config.policy.vllm
    if config.policy.engine != "vllm" or vllm.servers:
        return False
    if vllm.sync == "lora":
        why = "the profile's engines serve one base for all stages; use disk or nccl."
        raise ConfigError(f"policy.vllm.sync=lora: {why}")
    return True


def _clients(name: str) -> list[dict[str, str]]:
    """Returns the labels of the pods that may connect to a run's vLLM servers.  The first mapping selects the pods of
    stages, the second one the Ray pods of stages.  ``name`` is the name of the run's Workflow."""
    return [{label: name, COMPONENT_LABEL: "stage"} for label in (WORKFLOW_LABEL, POOL_LABEL)]


def engine_objects() -> list[dict[str, Any]]:
    """Returns templates of the Kubernetes objects of a run's vLLM servers, in the order of creation.  In names and
    labels, ``RUN`` stands for the name of the run's Workflow."""
    container = pools.container(
        "cuda-agent-engine",
        {"HOME": "/scratch", "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"},
        [pools.SHARED_MEMORY_MOUNT, {"name": "weights", "mountPath": FOLDER, "readOnly": True}],
        command=["python3", "-P", "-m", "cuda_agent.policy.engines.vllm_pool"],
        args=[],
        # No liveness probe: a replica answers only after the run's first policy, and exits on a failure.
        readinessProbe={"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5, "timeoutSeconds": 5},
    )
    pod = pools.pod_spec(
        "sandbox", 30, container,
        **pools.SHARED_MEMORY,
        weights={"persistentVolumeClaim": {"claimName": "", "readOnly": True}},
    )  # fmt: skip
    replicas = pools.servers("engine", "engine", {COMPONENT_LABEL: "engine"}, ENGINE_PORT, pod)
    return [*pools.around_servers("engine", ENGINE_PORT, pools.peers(*_clients(RUN_NAME))), replicas]


def objects(base: Sequence[Mapping[str, Any]], workflow: str, uid: str, config: Config) -> list[dict[str, Any]]:
    """Returns the Kubernetes objects of one run's vLLM servers.

    Args:
        base: Templates of the objects: those of ``engine_objects``, completed by the Helm chart.
        workflow: Name of the run's Workflow; replaces the placeholder ``RUN`` in the templates.
        uid: UID of the run's Workflow, which owns the objects.
        config: The run's configuration, from which the servers' arguments are taken."""
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
    """Returns (kind, name) of every object that ``objects`` can make for the Workflow ``workflow``."""
    walls = [("NetworkPolicy", f"{workflow}-engine-{suffix}") for suffix in ("stages", "ray")]
    return [*((kind, f"{workflow}-engine") for kind in ("StatefulSet", *pools.AROUND)), *walls]
