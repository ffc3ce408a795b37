# Sourced by the scripts beside it: places, addresses, and the few functions that more than one of them needs.
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$HERE/versions.env"
CLUSTER=${CLUSTER:-0} # clusters with different numbers, 0 to 99, stand side by side on one machine
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/cuda-agent/cluster # what was built, by version; kept
STATE=/var/tmp/cuda-agent-cluster-$CLUSTER               # everything else; goes with the cluster
PKI=$STATE/pki CONFIG=$STATE/config LOG=$STATE/log RUN=$STATE/run
SOCKET=$STATE/containerd.sock
CGROUP=cuda-agent-cluster-$CLUSTER # in every hierarchy
LINK=ca-cluster$CLUSTER            # this machine's end of the only wire into the cluster
HOST_IP=10.250.$CLUSTER.2 NODE_IP=10.250.$CLUSTER.1
SERVICES=10.96.0.0/16 API_IP=10.96.0.1 DNS_IP=10.96.0.10
PODS=10.244.0.0/24 GATEWAY=10.244.0.1
NODE=node1
SERVER=https://$NODE_IP:6443

say() { printf '%4ds  %s\n' $SECONDS "$*"; }
die() { echo "$*" >&2; exit 1; }

# at NAME: the folder of a built program. The fake drivers are ours: the source of one is its version.
at() {
  local version
  case $1 in
    fake-*) version=$KUBERNETES-$(sha256sum "$HERE/${1/-/_}.go" | cut -c1-12) ;;
    *) version=${1^^} && version=${!version} ;;
  esac
  echo "$CACHE/$1-$version"
}

kubectl() { "$(at kubernetes)/kubectl" --kubeconfig "$STATE/kubeconfig" "$@"; }
images() { ctr --address "$SOCKET" --namespace k8s.io images "$@"; }

retry() { # command...: up to five times, 3, 6, 12 and 24 seconds apart
  local wait=3 attempt
  for attempt in 1 2 3 4 5; do
    "$@" && return 0
    [ "$attempt" = 5 ] && return 1
    echo "failed (attempt $attempt of 5): $*; again in $wait s" >&2
    sleep "$wait"
    wait=$((wait * 2))
  done
}

install_packages() { # from Debian
  say "installing $*"
  retry apt-get update -q >/dev/null
  retry env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends --no-remove "$@" </dev/null >/dev/null
}

await() { # seconds what command...: until the command succeeds
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || die "gave up waiting: $what (logs: $LOG)"
    sleep 0.2
  done
}

# A process is named by its number and its start: numbers are used again.
start_of() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }
outer() { # the number of the process that holds the cluster's namespaces, if it lives
  local pid start
  read -r pid start 2>/dev/null <"$STATE/outer" && [ "$(start_of "$pid")" = "$start" ] && echo "$pid"
}
inner() { # the number, on this machine, of the first process inside
  local pid
  pid=$(outer) && pid=$(cat "/proc/$pid/task/$pid/children") && [ -n "$pid" ] && echo "${pid%% *}"
}
