"""volumes.py SERVER PKI USER FOLDER NODE: makes writable volumes on one node, as folders below FOLDER.

It serves claims whose storage class names ``PROVISIONER``. It makes a claim's volume once the scheduler has chosen the
node for the claim's first pod. It supports the reclaim policies Delete and Retain. It has no quotas (a claim's size is
not a limit), block devices, snapshots or resizing."""

import shutil
import sys
import urllib.error
from pathlib import Path

from kube import Api, Mirror, Object

PROVISIONER = "cuda-agent.test/folders"
CLAIMS, VOLUMES = "/api/v1/persistentvolumeclaims", "/api/v1/persistentvolumes"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"


def wanting(claim: Object, classes: dict[str, Object]) -> bool:
    kind = classes.get(claim["spec"].get("storageClassName") or "")
    notes = claim["metadata"].get("annotations") or {}
    if not kind or claim["spec"].get("volumeName") or "deletionTimestamp" in claim["metadata"]:
        return False
    return kind.get("volumeBindingMode") == "Immediate" or "volume.kubernetes.io/selected-node" in notes


def volume(claim: Object, kind: Object, folder: Path, node: str) -> Object:
    meta, spec = claim["metadata"], claim["spec"]
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": folder.name, "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER}},
        "spec": {
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            "persistentVolumeReclaimPolicy": kind.get("reclaimPolicy", "Delete"),
            "storageClassName": kind["metadata"]["name"],
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
            },
            "local": {"path": str(folder)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }


def provision(api: Api, claim: Object, kind: Object, root: Path, node: str) -> None:
    folder = root / f"pvc-{claim['metadata']['uid']}"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)  # pods run under users of their own
    try:
        api.call("POST", VOLUMES, volume(claim, kind, folder, node))
    except urllib.error.HTTPError as error:
        if error.code != 409:  # made a moment ago; the list does not show it yet
            raise
    print(f"made {folder.name} for {claim['metadata']['namespace']}/{claim['metadata']['name']}", flush=True)


def remove(api: Api, name: str, root: Path) -> None:
    shutil.rmtree(root / name, ignore_errors=True)
    try:
        api.call("DELETE", f"{VOLUMES}/{name}")
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
    print(f"removed {name}", flush=True)


def ours(thing: Object) -> bool:
    return (thing["metadata"].get("annotations") or {}).get("pv.kubernetes.io/provisioned-by") == PROVISIONER


def main(server: str, pki: str, user: str, folder: str, node: str) -> None:
    api, root = Api(server, Path(pki), user), Path(folder)
    for claims, volumes, listed in Mirror(api, CLAIMS, VOLUMES, CLASSES).changes():
        classes = {kind["metadata"]["name"]: kind for kind in listed if kind["provisioner"] == PROVISIONER}
        there = {volume["metadata"]["name"] for volume in volumes}
        for claim in claims:
            if wanting(claim, classes) and f"pvc-{claim['metadata']['uid']}" not in there:
                provision(api, claim, classes[claim["spec"]["storageClassName"]], root, node)
        for volume in filter(ours, volumes):
            released = volume["status"].get("phase") == "Released"
            if released and volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete":
                remove(api, volume["metadata"]["name"], root)


if __name__ == "__main__":
    main(*sys.argv[1:])
