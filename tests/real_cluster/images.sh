#!/usr/bin/env bash
# images.sh [NAME...]: builds the images that the cluster itself runs, or those named (kueue), with buildah, as archives in
# $CACHE/images, each once; prints the archives' paths.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
buildah() { command buildah --root "$work/storage" --runroot "$work/run" --storage-driver overlay "$@"; }

image() { # name tag folder-with-its-program [version, where the tag does not tell]
  local archive=$CACHE/images/$1-${4:-$2}-$recipe.tar name=localhost/$1:$2 log=$work/log
  echo "$archive"
  [ ! -f "$archive" ] || return 0
  mkdir -p "$CACHE/images"
  { buildah bud --isolation chroot --file "$HERE/system.Containerfile" --target "$1" --tag "$name" "$3" &&
    buildah push "$name" "docker-archive:$work/$1.tar:$name"; } >"$log" 2>&1 ||
    { cat "$log" >&2 && die "building the image $1 failed"; }
  mv "$work/$1.tar" "$archive.new" && mv "$archive.new" "$archive"
  say "built the image $name" >&2
}

recipe=$(sha256sum "$HERE/system.Containerfile" | cut -c1-8)
for name; do
  version=${name^^}
  image "$name" "v${!version}" "$(at "$name")"
done
[ $# = 0 ] || exit 0
mkdir "$work/small"
gcc -Os -static -s -o "$work/small/pause" "$HERE/pause.c"
cp /bin/busybox "$work/small/"
image pause 1 "$work/small" "$(sha256sum "$HERE/pause.c" | cut -c1-8)"
image busybox 1 "$work/small" "$(sha256sum /bin/busybox | cut -c1-8)"
image coredns "v$COREDNS" "$(at coredns)"
image workflow-controller "v$ARGO" "$(at argo)"
image argoexec "v$ARGO" "$(at argo)"
