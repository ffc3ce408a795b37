#!/usr/bin/env bash
# kueue.sh: Kueue on the running cluster, in the namespace `kueue-system`, for the tests of queues. No other test needs it,
# so neither build.sh nor up.sh makes it by itself: the first time it is built for minutes.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
outer >/dev/null || die "No cluster is up: make cluster-up"
"$HERE/build.sh" kueue
exec 9>"$CACHE/.kueue" && flock 9
archive=$("$HERE/images.sh" kueue)
[ -e "$STATE/loaded/${archive##*/}" ] || { images import "$archive" >/dev/null && touch "$STATE/loaded/${archive##*/}"; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$(at kueue)/config" "$work/"
sed -i 's/leaderElect: true/leaderElect: false/' "$work/config/components/manager/controller_manager_config.yaml" # it is alone
sed "s/@KUEUE@/$KUEUE/" "$HERE/manifests/kueue.yaml" >"$work/kustomization.yaml"
kubectl kustomize "$work" | kubectl apply --server-side --force-conflicts -f - >/dev/null
kubectl -n kueue-system rollout status deployment/kueue-controller-manager --timeout=180s >/dev/null
say "Kueue $KUEUE is up"
