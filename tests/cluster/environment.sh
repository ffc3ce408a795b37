#!/usr/bin/env bash
# environment.sh NAMESPACE: a read-only claim `environment` in that namespace, with this checkout's .venv in it. Pods of
# the project's images mount it at /opt/environment: several gigabytes of PyTorch are not copied into images.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
folder=$(readlink -f "$HERE/../../.venv")
[ -d "$folder/lib/python3.11/site-packages" ] || die "$folder is no virtual environment of Python 3.11, the images' version."
kubectl apply -f - <<Y
apiVersion: v1
kind: PersistentVolume
metadata: {name: environment-$1}
spec:
  capacity: {storage: 10Gi}
  accessModes: [ReadOnlyMany]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: ""
  local: {path: "$folder"}
  claimRef: {namespace: "$1", name: environment}
  nodeAffinity:
    required:
      nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [$NODE]}]}]
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: environment, namespace: "$1"}
spec:
  accessModes: [ReadOnlyMany]
  storageClassName: ""
  volumeName: environment-$1
  resources: {requests: {storage: 1Gi}}
Y
