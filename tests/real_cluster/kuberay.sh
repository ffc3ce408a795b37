#!/usr/bin/env bash
# kuberay.sh: KubeRay's operator on the running cluster, in the namespace `kuberay`, for the tests of a stage in several
# pods. No other test needs it, so neither build.sh nor up.sh makes it by itself: the first time it is built for minutes.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
outer >/dev/null || die "No cluster is up: make cluster-up"
"$HERE/build.sh" kuberay
built=$(at kuberay) image=localhost/kuberay:v$KUBERAY
archive=$CACHE/images/kuberay-$KUBERAY.tar
exec 9>"$CACHE/.kuberay" && flock 9
if [ ! -f "$archive" ]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  export TMPDIR=$work
  buildah() { command buildah --root "$work/storage" --runroot "$work/run" --storage-driver overlay "$@"; }
  made=$(buildah from scratch)
  buildah copy --quiet "$made" "$built/manager" /manager >/dev/null
  buildah config --user 65532:65532 --entrypoint '["/manager"]' "$made"
  buildah commit --quiet --rm "$made" "$image" >/dev/null
  buildah push --quiet "$image" "docker-archive:$work/kuberay.tar:$image"
  mv "$work/kuberay.tar" "$archive.new" && mv "$archive.new" "$archive"
fi
[ -e "$STATE/loaded/${archive##*/}" ] || { images import "$archive" >/dev/null && touch "$STATE/loaded/${archive##*/}"; }
kubectl apply --server-side --force-conflicts -f "$built/crds" >/dev/null
sed "s/@KUBERAY@/$KUBERAY/" "$HERE/manifests/kuberay.yaml" | kubectl apply --server-side --force-conflicts -f - >/dev/null
kubectl -n kuberay rollout status deployment/kuberay-operator --timeout=180s >/dev/null
say "KubeRay $KUBERAY is up"
