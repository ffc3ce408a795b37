#!/usr/bin/env bash
# enter.sh [COMMAND...]: runs a command, or a shell, inside the cluster's namespaces; there `pkill -x kubelet` ends the
# cluster's kubelet and no other, and `iptables -t mangle -S` shows the policies' rules.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
pid=$(inner) || die "No cluster is up: make cluster-up"
[ $# -gt 0 ] || set -- bash
exec nsenter --target "$pid" --net --mount --pid -- "$@"
