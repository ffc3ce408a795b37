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
await 20 "its link" sh -c "! ip link show $LINK"
while read -r file value; do
  [ "$(cat "/proc/sys/$file")" = "$value" ] || echo "$value" >"/proc/sys/$file"
done <"$STATE/sysctls" 2>/dev/null || true
for parent in $(awk '$3 ~ /^cgroup2?$/ { print $2 }' /proc/mounts); do
  [ ! -d "$parent/$CGROUP" ] || await 20 "$parent/$CGROUP" find "$parent/$CGROUP" -depth -type d -exec rmdir {} +
done
rm -rf --one-file-system "$STATE"
