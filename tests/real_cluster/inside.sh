#!/usr/bin/env bash
# inside.sh: the first process of the cluster's namespaces (network, mounts, processes); up.sh starts it.
# Whatever the cluster mounts, links, filters or runs is inside these namespaces: when this process ends, the kernel takes
# all of it away. A component that ends is started again after a second, as systemd would.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
BIN=$(at kubernetes)
keep() { # name command...
  local name=$1
  shift
  while :; do
    status=0
    "$@" </dev/null >>"$LOG/$name.log" 2>&1 || status=$?
    echo "[$name ended with $status]" >>"$LOG/$name.log"
    sleep 1
  done &
}
as() { echo "--kubeconfig=$STATE/users/$1" "--authentication-kubeconfig=$STATE/users/$1" "--authorization-kubeconfig=$STATE/users/$1"; }
python() { echo /usr/bin/python3 -B "$HERE/$1.py" "$SERVER" "$PKI" "$1"; }

mount --make-rshared / # for this namespace: pods may ask for mounts that propagate
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/log
mount -t tmpfs tmpfs /var/lib
mkdir -p /run/lock /var/lib/kubelet "$STATE/kubelet"
mount --bind "$STATE/kubelet" /var/lib/kubelet

for file in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys \
  kernel/keys/root_maxbytes; do # the kubelet sets these, and they have no namespace: it gets copies
  [ -e "/proc/sys/$file" ] || continue
  mkdir -p "/run/sys/${file%/*}"
  cat "/proc/sys/$file" >"/run/sys/$file"
  mount --bind "/run/sys/$file" "/proc/sys/$file"
done

ip link set lo up
await 20 "the wire from outside" ip link show eth0
ip addr add "$NODE_IP/30" dev eth0
ip link set eth0 up
ip route add "$SERVICES" dev eth0 src "$NODE_IP" # the API server calls webhooks by their services; kube-proxy leads on
# The wire leads in alone: what runs in the cluster answers, and opens no connection to this machine or beyond.
iptables -t mangle -A POSTROUTING -o eth0 -m conntrack --ctstate NEW -j DROP
# With bridge-nf traffic between two pods on the bridge is filtered too; pods have IPv4 only.
sysctl -qw net.ipv4.ip_forward=1 net.bridge.bridge-nf-call-iptables=1 net.bridge.bridge-nf-call-ip6tables=1
sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1
ip6tables -P FORWARD DROP && ip6tables -P INPUT DROP
keep netpol $(python netpol) "$PODS" "$GATEWAY"
await 20 "the drop rules" iptables -t mangle -S NETPOL-KNOWN # before the first pod: the network fails closed

ulimit -n "$(ulimit -Hn)"
keep containerd containerd --config "$CONFIG/containerd.toml" --log-level info
keep etcd "$(at etcd)/etcd" --name $NODE --data-dir "$STATE/etcd" --unsafe-no-fsync --log-level warn \
  --max-request-bytes=8388608 # Argo's full definition of a workflow takes more than the usual 1.5 MB
keep apiserver "$BIN/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 --bind-address="$NODE_IP" \
  --advertise-address="$NODE_IP" --secure-port=6443 --service-cluster-ip-range=$SERVICES \
  --client-ca-file="$PKI/ca.crt" --tls-cert-file="$PKI/apiserver.crt" --tls-private-key-file="$PKI/apiserver.key" \
  --kubelet-client-certificate="$PKI/apiserver-kubelet.crt" --kubelet-client-key="$PKI/apiserver-kubelet.key" \
  --kubelet-certificate-authority="$PKI/ca.crt" --kubelet-preferred-address-types=InternalIP \
  --service-account-issuer=https://kubernetes.default.svc.cluster.local \
  --service-account-key-file="$PKI/service-accounts.pub" --service-account-signing-key-file="$PKI/service-accounts.key" \
  --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --anonymous-auth=false \
  --requestheader-client-ca-file="$PKI/front-ca.crt" --requestheader-allowed-names=front-proxy-client \
  --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group \
  --requestheader-extra-headers-prefix=X-Remote-Extra- --allow-privileged=true --event-ttl=24h
# The controller manager leaves when it comes before the roles that the API server makes at first; so does no pod start.
await 120 "the API server" kubectl get --raw /readyz
keep controller-manager "$BIN/kube-controller-manager" $(as controller-manager) --bind-address=127.0.0.1 \
  --leader-elect=false --use-service-account-credentials=true --root-ca-file="$PKI/ca.crt" \
  --service-account-private-key-file="$PKI/service-accounts.key" --pvclaimbinder-sync-period=2s \
  --cluster-signing-cert-file="$PKI/ca.crt" --cluster-signing-key-file="$PKI/ca.key" \
  --allocate-node-cidrs=true --cluster-cidr="${PODS%/*}/16" --node-cidr-mask-size=24 --service-cluster-ip-range=$SERVICES
keep scheduler "$BIN/kube-scheduler" $(as scheduler) --bind-address=127.0.0.1 --leader-elect=false
keep proxy "$BIN/kube-proxy" --config="$CONFIG/proxy.yaml"
keep kubelet "$BIN/kubelet" --config="$CONFIG/kubelet.yaml" --kubeconfig="$STATE/users/kubelet" \
  --root-dir=/var/lib/kubelet --hostname-override=$NODE --node-ip="$NODE_IP" --v=2
keep volumes $(python volumes) "$STATE/volumes" $NODE
keep fake-gpu "$(at fake-gpu)/fake-gpu" /var/lib/kubelet/device-plugins "${GPUS:-4}" ${GPU_FILES:-}
wait
