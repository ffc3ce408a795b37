#!/usr/bin/env bash
# build.sh [NAME...]: builds the project's images with buildah: stage sandbox mlflow minio, or those named; engine (vLLM,
# 10 GB) and ray (on top of stage) only when they are named.
#
#   REGISTRY=localhost  where they belong, as in registry.example.org/team
#   PUSH=1              pushes them there, and writes their digests to build/images/values.yaml for `helm -f`;
#                       signs them with cosign, and adds a bill of materials by syft, where these are installed
#   BASE, BUILDER, ENVIRONMENT, STAGE, VLLM, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS   as the Containerfiles say
#   CA_BUNDLE           certificate authorities that pip trusts during the build, where a proxy has one of its own
#   BUILDAH="buildah"   the command, with options for its storage
#   BUILDAH_ISOLATION   buildah's own: "chroot" where a build may not make namespaces, as inside a container
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
REGISTRY=${REGISTRY:-localhost} BUILDAH=${BUILDAH:-buildah} PUSH=${PUSH:-} out=build/images
STAGE=${STAGE:-$REGISTRY/cuda-agent} # what the image ray is built on
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[ $# -gt 0 ] || set -- stage sandbox mlflow minio

arguments=(--build-arg "VERSION=$version" --build-arg "REVISION=$revision")
for name in BASE BUILDER ENVIRONMENT STAGE VLLM PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS; do
  [ -z "${!name:-}" ] || arguments+=(--build-arg "$name=${!name}")
done

[ -z "${CA_BUNDLE:-}" ] || arguments+=(--volume "$CA_BUNDLE:/etc/ssl/certs/ca-certificates.crt:ro")

rm -rf "$out" && mkdir -p "$out"
.venv/bin/python -m build --wheel --no-isolation --outdir "$out" >"$out/wheel.log" 2>&1 || { cat "$out/wheel.log" >&2; exit 1; }
[ -z "$PUSH" ] || echo "images:" >"$out/values.yaml"
for name; do
  repository=cuda-agent$([ "$name" = stage ] || echo "-$name")
  image=$REGISTRY/$repository:$version
  $BUILDAH bud --layers --file "images/$name.Containerfile" --ignorefile images/ignore \
    --tag "$image" "${arguments[@]}" .
  [ -n "$PUSH" ] || continue
  $BUILDAH push --digestfile "$out/$name.digest" "$image"
  printf '  %s: {digest: "%s"}\n' "$name" "$(cat "$out/$name.digest")" >>"$out/values.yaml"
  pushed=$REGISTRY/$repository@$(cat "$out/$name.digest")
  if command -v syft >/dev/null; then
    syft "$pushed" -o spdx-json >"$out/$name.spdx.json"
    ! command -v cosign >/dev/null || cosign attest --yes --type spdxjson --predicate "$out/$name.spdx.json" "$pushed"
  fi
  ! command -v cosign >/dev/null || cosign sign --yes "$pushed"
done
[ -z "$PUSH" ] || sed -i "1a\\  registry: \"$REGISTRY\"" "$out/values.yaml"
