#!/usr/bin/env bash
# environment.sh NAMESPACE [CLAIM FOLDER]: a read-only claim `environment` in that namespace, with this checkout's .venv in
# it, or another claim with another virtual environment. Pods of the project's images mount it at /opt/environment: several
# gigabytes of PyTorch are not copied into images.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
claim=${2:-environment} folder=$(readlink -f "${3:-$HERE/../../.venv}")
# Folders that are no virtual environment, such as /usr, are taken as they are.
[ -d "$folder" ] || die "There is no folder $folder."
[ ! -e "$folder/pyvenv.cfg" ] || [ -d "$folder/lib/python3.11/site-packages" ] || die "$folder is no virtual environment of Python 3.11, the images' version."
kubectl apply -f - <<Y
apiVersion: v1
kind: PersistentVolume
metadata: {name: $claim-$1}
spec:
  capacity: {storage: 10Gi}
  accessModes: [ReadOnlyMany]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: ""
  local: {path: "$folder"}
  claimRef: {namespace: "$1", name: $claim}
  nodeAffinity:
    required:
      nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [$NODE]}]}]
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: $claim, namespace: "$1"}
spec:
  accessModes: [ReadOnlyMany]
  storageClassName: ""
  volumeName: $claim-$1
  resources: {requests: {storage: 1Gi}}
Y
