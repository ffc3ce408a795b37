#!/usr/bin/env bash
# configs.sh: the configuration files of containerd, the network plugins, the kubelet and kube-proxy.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
mkdir -p "$CONFIG/cni"
: >"$CONFIG/resolv.conf" # this machine's name servers do not leak into pods

# Without CAP_SYS_RESOURCE, as in many virtual machines and containers, no process may lower its oom_score_adj.
cat >"$CONFIG/containerd.toml" <<T
version = 2
root = "$STATE/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "$SOCKET"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$CONFIG/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
T

cat >"$CONFIG/cni/10-pods.conflist" <<J
{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "isDefaultGateway": true, "ipMasq": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "dataDir": "/run/cni-addresses", "ranges": [[{"subnet": "$PODS"}]]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
J

# Images are never collected: no registry could give them back. podPidsLimit: what `doctor` asks clusters for.
cat >"$CONFIG/kubelet.yaml" <<Y
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $NODE_IP
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $PKI/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $PKI/kubelet-serving.crt
tlsPrivateKeyFile: $PKI/kubelet-serving.key
containerRuntimeEndpoint: unix://$SOCKET
cgroupDriver: cgroupfs
cgroupRoot: /$CGROUP
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: []
seccompDefault: true
podPidsLimit: 4096
evictionHard: {memory.available: 200Mi, nodefs.available: 1Gi, imagefs.available: 1Gi}
evictionPressureTransitionPeriod: 10s
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
volumePluginDir: /var/lib/kubelet/volumeplugins
podLogsDir: $LOG/pods
resolvConf: $CONFIG/resolv.conf
clusterDNS: [$DNS_IP]
clusterDomain: cluster.local
readOnlyPort: 0
healthzBindAddress: 127.0.0.1
maxPods: 110
maxOpenFiles: $(ulimit -Hn)
serializeImagePulls: false
Y

cat >"$CONFIG/proxy.yaml" <<Y
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
bindAddress: $NODE_IP
healthzBindAddress: 127.0.0.1:10256
metricsBindAddress: 127.0.0.1:10249
clientConnection: {kubeconfig: $STATE/users/proxy}
mode: iptables
clusterCIDR: ${PODS%/*}/16
hostnameOverride: $NODE
nodePortAddresses: [$NODE_IP/32]
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
Y
