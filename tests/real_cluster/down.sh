#!/usr/bin/env bash
# down.sh: ends the cluster and removes whatever it made outside the cache. It ends nothing that up.sh did not start.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
[ "$(id -u)" = 0 ] || die "Needs root."

# With the first process inside, the kernel ends every other one and takes away mounts, links and filter rules.
if pid=$(outer); then
  kill -KILL "$pid"
  await 30 "the cluster's processes" sh -c "! kill -0 $pid || grep -q '^State:.[ZX]' /proc/$pid/status"
fi
# A closing connection may keep the empty network namespace in the kernel for a minute; our end of the wire need not wait.
! ip link show "$LINK" >/dev/null 2>&1 || ip link delete "$LINK"
for parent in $(awk '$3 ~ /^cgroup2?$/ { print $2 }' /proc/mounts); do
  [ ! -d "$parent/$CGROUP" ] || await 20 "$parent/$CGROUP" find "$parent/$CGROUP" -depth -type d -exec rmdir {} +
done
rm -rf --one-file-system "$STATE"
