"""Says why pods do not become ready, in Kubernetes' own words, and whether only a person can help.

Kubernetes reports the reason in three places: the states of a pod's containers, the pod's conditions, and events."""

from collections.abc import Iterator, Sequence
from typing import Any

from cuda_agent.cluster.api import Cluster

# Reasons of a waiting container that do not pass: a wrong image, a missing secret, a program that ends at once.
_HOPELESS = frozenset({
    "CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull", "ErrImagePull",
    "ImageInspectError", "ImagePullBackOff", "InvalidImageName", "RunContainerError",
})  # fmt: skip
HOPELESS_SECONDS = 120.0  # how long such a reason may last: a registry may be away for a minute
TELL_SECONDS = 10.0  # pause between two looks at the pods


def is_hopeless(pods: Sequence[dict[str, Any]]) -> bool:
    """Returns whether each of ``pods`` has a container that cannot start without a person's help.  A container that
    ends again and again counts also while it runs."""
    return bool(pods) and all(any(map(_cannot_start, _containers(pod))) for pod in pods)


def is_queued(pods: Sequence[dict[str, Any]]) -> bool:
    """Returns whether all ``pods`` wait for a queue, such as Kueue's, to let the scheduler place them."""
    return bool(pods) and all(
        any(one["type"] == "PodScheduled" and one.get("reason") == "SchedulingGated" for one in _conditions(pod))
        for pod in pods
    )


def why(cluster: Cluster, pods: Sequence[dict[str, Any]], owner: str) -> str:
    """Returns the reasons why ``pods`` are not ready.  Asks for events if the pods themselves give none.  ``owner`` is
    the name of the object that makes the pods, whose events say why there are none."""
    reasons = [reason for pod in pods for reason in _reasons(pod)]
    if not reasons:
        for name in [pod["metadata"]["name"] for pod in pods[:3]] or [owner]:
            events = cluster.all("Event", fields=f"involvedObject.name={name},type=Warning")
            reasons += [event.get("message", "") for event in sorted(events, key=_when)[-1:]]
    return "; ".join(dict.fromkeys(filter(None, reasons)))[:600] or ("no reason given" if pods else "it has no pods")


def _reasons(pod: dict[str, Any]) -> Iterator[str]:
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting", {})
        ended = container.get("lastState", {}).get("terminated") or container.get("state", {}).get("terminated") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            yield _joined(waiting.get("reason"), waiting.get("message"))
        if ended.get("exitCode"):
            yield _joined(f"{container['name']} ended with {ended['exitCode']}", ended.get("message"))
    for condition in _conditions(pod):
        if condition["type"] == "PodScheduled" and condition.get("status") == "False":
            yield _joined(condition.get("reason"), condition.get("message"))


def _conditions(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return pod.get("status", {}).get("conditions", [])


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def _cannot_start(container: dict[str, Any]) -> bool:
    again = container.get("restartCount", 0) > 1 and not container.get("ready")
    return again or container.get("state", {}).get("waiting", {}).get("reason") in _HOPELESS


def _joined(reason: str | None, message: str | None) -> str:
    return ": ".join(filter(None, [reason, " ".join((message or "").split())]))


def _when(event: dict[str, Any]) -> str:
    return event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or ""
