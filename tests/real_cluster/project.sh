#!/usr/bin/env bash
# project.sh [NAME...]: builds the project's images from images/*.Containerfile and gives them to the running cluster, as
# localhost/cuda-agent:VERSION and localhost/cuda-agent-{sandbox,mlflow,minio}:VERSION; `ray` and `engine` only when they are
# named, and `ray` after `stage`. Two things come from elsewhere than in a release: the base is made by debootstrap, as there is no registry, and
# /opt/environment is empty, for the volume that environment.sh makes. MinIO is the one that build.sh built.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
outer >/dev/null || die "No cluster is up: make cluster-up"
STORE=$CACHE/buildah # keeps layers, so that a changed line of the package builds in seconds
buildah() { command buildah --root "$STORE" --runroot "$STORE-run" --storage-driver overlay "$@"; }
exec 9>"$CACHE/.project" && flock 9
mkdir -p "$STORE-run/tmp"
export TMPDIR=$STORE-run/tmp # buildah's own folder would be /var/tmp

base() {
  local folder=$CACHE/debian-12 mirror made
  ! buildah inspect --type image localhost/debian:12 >/dev/null 2>&1 || return 0
  command -v debootstrap >/dev/null || install_packages debootstrap
  mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources} 2>/dev/null |
    sed -n 's/^URIs: *//p; s/^deb  *\(http[^ ]*\).*/\1/p' | grep -m1 '/debian/*$') || true
  [ -n "$mirror" ] || die "Found no Debian mirror in /etc/apt."
  say "making a Debian 12 by debootstrap"
  rm -rf "$folder"
  retry debootstrap --variant=minbase --include=ca-certificates bookworm "$folder" "$mirror" >/dev/null
  rm -rf "$folder"/{var/cache/apt,var/lib/apt/lists,var/log,dev,proc,sys,run,tmp}/* "$folder"/usr/share/{doc,man,locale}/*
  made=$(buildah from scratch)
  buildah add --quiet "$made" "$folder" / >/dev/null
  buildah commit --quiet --rm "$made" localhost/debian:12 >/dev/null
  rm -rf "$folder"
}

builder() { # what minio.Containerfile would build MinIO in, with MinIO already built
  local made
  ! buildah inspect --type image "localhost/minio-builder:$MINIO" >/dev/null 2>&1 || return 0
  "$HERE/build.sh" minio
  made=$(buildah from localhost/debian:12)
  buildah copy --quiet "$made" "$(at minio)/minio" /go/bin/minio >/dev/null
  buildah commit --quiet --rm "$made" "localhost/minio-builder:$MINIO" >/dev/null
}

[ $# -gt 0 ] || set -- stage sandbox mlflow minio
base
[[ " $* " != *" minio "* ]] || builder
[[ " $* " != *" ray "* ]] || export CA_BUNDLE=${CA_BUNDLE:-${PIP_CERT:-}} # whom pip trusts on this machine
BASE=localhost/debian:12 BUILDER=localhost/minio-builder:$MINIO ENVIRONMENT=none BUILDAH_ISOLATION=chroot \
  BUILDAH="buildah --root $STORE --runroot $STORE-run --storage-driver overlay" \
  "$HERE/../../images/build.sh" "$@" >"$LOG/images.log" 2>&1 || { tail -30 "$LOG/images.log" >&2; die "building the images failed"; }
say "built $*"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$HERE/../../pyproject.toml")
for name; do
  image=localhost/cuda-agent$([ "$name" = stage ] || echo "-$name"):$version
  id=$(buildah images --quiet --no-trunc "$image")
  [ "$(cat "$STATE/loaded/$name" 2>/dev/null)" != "$id" ] || continue
  rm -f "$STATE/image.tar"
  buildah push --quiet "$image" "docker-archive:$STATE/image.tar:$image"
  "$HERE/load.sh" "$STATE/image.tar" >/dev/null
  rm -f "$STATE/image.tar"
  echo "$id" >"$STATE/loaded/$name"
  say "loaded $image"
done
