#!/usr/bin/env bash
# up.sh: builds what is missing, then starts a one-node Kubernetes with Argo Workflows in namespaces of its own.
# Everything that it starts, mounts, links and filters lives in these namespaces; its files lie in $STATE and $CACHE.
# Run again, it completes what is missing and says where the cluster is. CLUSTER=1 up.sh starts a second one beside it.
# PACKED=1 up.sh builds and installs nothing: gpu_node.sh has unpacked everything. GPUS=N GPU_FILES="FILE..." up.sh: the
# node offers N GPUs, and a container that asks for one gets these device files.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
[ "$(id -u)" = 0 ] || die "Needs root: it makes namespaces, mounts and control groups."
mkdir -p "$CACHE"
exec 8>"$CACHE/.lock-$CLUSTER" && flock 8

packages() { # none of them starts anything by itself where systemd does not run
  local wanted=() entry
  for entry in containerd:containerd runc:runc iptables:iptables conntrack:conntrack ip:iproute2 openssl:openssl \
    buildah:buildah gcc:gcc /usr/lib/cni/bridge:containernetworking-plugins \
    /usr/include/stdlib.h:libc6-dev unshare:util-linux; do
    command -v "${entry%%:*}" >/dev/null || [ -e "${entry%%:*}" ] || wanted+=("${entry##*:}")
  done
  /usr/bin/python3 -c 'import ssl, http.client' 2>/dev/null || wanted+=(python3) # the system's own; a smaller one lacks these
  dpkg-query -W busybox-static >/dev/null 2>&1 || wanted+=(busybox-static) # another busybox would need its libraries
  [ ${#wanted[@]} = 0 ] || install_packages "${wanted[@]}"
}

groups() { # a control group of ours in every hierarchy; on version 1 a new cpuset starts empty
  # Beside a machine's other work all pods together would weigh as one process; they are several, and so is a cluster.
  local parent file
  for parent in $(awk '$3 ~ /^cgroup2?$/ { print $2 }' /proc/mounts); do
    if [ -e "$parent/cgroup.subtree_control" ]; then # version 2, where no systemd has given controllers to groups
      for file in $(cat "$parent/cgroup.controllers"); do
        echo "+$file" >"$parent/cgroup.subtree_control" 2>/dev/null || true # the kubelet names those that it misses
      done
    fi
    mkdir -p "$parent/$CGROUP"
    [ ! -e "$parent/cpuset.mems" ] || for file in cpuset.cpus cpuset.mems; do cat "$parent/$file" >"$parent/$CGROUP/$file"; done
    [ ! -e "$parent/$CGROUP/cpu.shares" ] || echo 4096 >"$parent/$CGROUP/cpu.shares"
    [ ! -e "$parent/$CGROUP/cpu.weight" ] || echo 400 >"$parent/$CGROUP/cpu.weight"
  done
}

namespaces() {
  groups
  setsid unshare --net --mount --pid --fork --mount-proc --kill-child bash "$HERE/inside.sh" \
    </dev/null >"$LOG/inside.log" 2>&1 8>&- 9>&- &
  echo "$! $(start_of $!)" >"$STATE/outer"
  await 10 "the namespaces" inner
  ip link add "$LINK" type veth peer name eth0 netns "$(inner)"
  ip addr add "$HOST_IP/30" dev "$LINK"
  ip link set "$LINK" up
}

load() { # once each
  local archive
  mkdir -p "$STATE/loaded"
  for archive; do
    [ -e "$STATE/loaded/${archive##*/}" ] && continue
    images import "$archive" >/dev/null && touch "$STATE/loaded/${archive##*/}"
  done
}

ready() { kubectl get node $NODE -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}' | grep -q True; }
gpus() { kubectl get node $NODE -o 'jsonpath={.status.allocatable.nvidia\.com/gpu}' | grep -q '[1-9]'; }
apply() { kubectl apply --server-side --force-conflicts "$@" >/dev/null; }

argo_manifests() { # rendered once: the definitions are seven megabytes, which takes kubectl 20 seconds
  local rendered work
  rendered=$CACHE/argo-manifests-$ARGO-$(sha256sum "$HERE/manifests/kustomization.yaml" | cut -c1-12).yaml
  if [ ! -f "$rendered" ]; then
    work=$(mktemp -d)
    cp -r "$(at argo)/manifests" "$work/"
    sed "s/@ARGO@/$ARGO/" "$HERE/manifests/kustomization.yaml" >"$work/kustomization.yaml"
    kubectl kustomize "$work" >"$rendered.new" && mv "$rendered.new" "$rendered"
    rm -rf "$work"
  fi
  echo "$rendered"
}

if [ -n "${PACKED:-}" ]; then
  archives=$(ls "$CACHE"/images/*.tar)
else
  packages
  "$HERE/build.sh" kubernetes etcd coredns argo helm fake-gpu
  archives=$("$HERE/images.sh")
fi
argo=$(argo_manifests)
if ! outer >/dev/null; then
  "$HERE/down.sh" # what an earlier one left when the machine went down under it
  mkdir -p "$STATE" "$LOG/pods" "$STATE/volumes"
  "$HERE/certs.sh"
  "$HERE/configs.sh"
  namespaces
fi
await 30 "containerd" images list
load $archives
say "images imported"
await 150 "the API server" kubectl get --raw /readyz
say "the API server is ready"
apply -f "$HERE/manifests/rbac.yaml"
sed "s/@COREDNS@/$COREDNS/" "$HERE/manifests/dns.yaml" | apply -f -
kubectl get namespace argo >/dev/null 2>&1 || kubectl create namespace argo >/dev/null
[ "$(cat "$STATE/argo" 2>/dev/null)" = "$argo" ] || { apply -f "$argo" && echo "$argo" >"$STATE/argo"; }
await 120 "the node" ready
await 120 "the fake GPUs" gpus
await 120 "the default service account" kubectl -n default get serviceaccount default
kubectl -n kube-system rollout status deployment/coredns --timeout=180s >/dev/null
kubectl -n argo rollout status deployment/workflow-controller --timeout=180s >/dev/null
say "the cluster is up: Kubernetes $KUBERNETES, Argo Workflows $ARGO, containerd $(containerd --version | cut -d' ' -f3)"
echo "export KUBECONFIG=$STATE/kubeconfig PATH=$(at kubernetes):$(at helm):\$PATH" >"$STATE/environment"
cat <<T

  . $STATE/environment     # kubectl and helm, and which cluster they mean
  kubectl get nodes

Logs: $LOG. A shell inside: tests/real_cluster/enter.sh. An image: tests/real_cluster/load.sh ARCHIVE. To end it: make cluster-down
T
