#!/usr/bin/env bash
# build.sh [NAME...]: builds the cluster's programs (those that every cluster needs, or those named: kubernetes etcd coredns
# argo helm minio fake-gpu fake-dra kuberay kueue kwok) from their Go modules. Each lands in $CACHE/NAME-VERSION, complete or not at all, and is built once.
# Go's own caches are used and kept.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
export CGO_ENABLED=0 GOFLAGS=-buildvcs=false GO111MODULE=on

. "$HERE/go.sh"

gobuild() { nice -n 19 go build -trimpath "$@"; }
goget() { retry nice -n 19 go get "$@"; } # always with a version: without one it takes the newest

kubernetes() {
  # The module refers to 31 staging modules by relative paths that only its repository has: each gets its version here.
  local file name
  retry go mod download "k8s.io/kubernetes@v$KUBERNETES"
  file=$(go mod download -json "k8s.io/kubernetes@v$KUBERNETES" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
  sed -n 's#^\s*\(k8s.io/[a-z-]*\) => ./staging/.*#\1#p' "$file" | while read -r name; do
    go mod edit -replace="$name=$name@v0.${KUBERNETES#1.}"
  done
  # Without a version the server calls itself v0.0.0, and every chart that asks for one is refused.
  local at flags="-s -w"
  for at in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    flags+=" -X $at.gitVersion=v$KUBERNETES -X $at.gitMajor=1 -X $at.gitMinor=$(cut -d. -f2 <<<"$KUBERNETES")"
  done
  for name in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl; do
    goget -tool "k8s.io/kubernetes/cmd/$name@v$KUBERNETES"
    gobuild -ldflags "$flags" -o "$1/$name" "k8s.io/kubernetes/cmd/$name"
  done
}

etcd() {
  goget -tool "go.etcd.io/etcd/server/v3@v$ETCD"
  gobuild -ldflags "-s -w" -o "$1/etcd" go.etcd.io/etcd/server/v3
}

coredns() {
  goget -tool "github.com/coredns/coredns@v$COREDNS"
  gobuild -ldflags "-s -w" -o "$1/coredns" github.com/coredns/coredns
}

helm() {
  goget -tool "helm.sh/helm/v3/cmd/helm@v$HELM"
  local at=helm.sh/helm/v3/internal/version minor
  minor=$(cut -d. -f2 <<<"$KUBERNETES") # what `helm template` and `helm lint` take the cluster to be
  gobuild -ldflags "-s -w -X $at.version=v$HELM -X helm.sh/helm/v3/pkg/lint/rules.k8sVersionMajor=1 \
    -X helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor=$minor -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor=1 \
    -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor=$minor" -o "$1/helm" helm.sh/helm/v3/cmd/helm
}

minio() {
  goget -tool "github.com/minio/minio@v$MINIO"
  gobuild -ldflags "-s -w" -o "$1/minio" github.com/minio/minio
}

argo() {
  # A later tablewriter has another interface, and nothing in the module's own go.mod keeps it away.
  go mod edit -replace=github.com/olekukonko/tablewriter=github.com/olekukonko/tablewriter@v0.0.5
  local module=github.com/argoproj/argo-workflows/v3 at
  goget -tool "$module/cmd/workflow-controller@v$ARGO"
  goget -tool "$module/cmd/argoexec@v$ARGO"
  at=$(go list -m -f '{{.Dir}}' $module)
  # Modules leave symbolic links out, and one source file of the executor is a link: built from a copy that has it.
  mkdir source
  tar -C "$at" -cf - --exclude=./ui --exclude=./docs --exclude=./sdks --exclude=./test --exclude=./examples . |
    tar -C source -xf -
  chmod -R u+w source
  cp source/workflow/executor/osspecific/signal_{darwin,linux}.go
  go mod edit -replace=$module=./source
  local name
  for name in workflow-controller argoexec; do
    gobuild -mod=mod -ldflags "-s -w -X $module.version=v$ARGO -X $module.gitTag=v$ARGO -X $module.gitTreeState=clean" \
      -o "$1/$name" "$module/cmd/$name"
  done
  cp -r source/manifests "$1/manifests"
}

kuberay() { # asked for by the tests of a stage in several pods alone
  local module=github.com/ray-project/kuberay/ray-operator
  goget -tool "$module@v$KUBERAY"
  gobuild -p 1 -ldflags "-s -w" -o "$1/manager" "$module"
  cp -r "$(go list -m -f '{{.Dir}}' $module)/config/crd/bases" "$1/crds"
  chmod -R u+w "$1/crds"
}

kueue() { # asked for by the tests of queues alone
  local module=sigs.k8s.io/kueue
  goget -tool "$module/cmd/kueue@v$KUEUE"
  gobuild -ldflags "-s -w -X $module/pkg/version.GitVersion=v$KUEUE" -o "$1/kueue" "$module/cmd/kueue"
  cp -r "$(go list -m -f '{{.Dir}}' $module)/config" "$1/config"
  chmod -R u+w "$1/config"
}

kwok() { # asked for by the benchmark of many runs alone
  local module=sigs.k8s.io/kwok
  goget -tool "$module/cmd/kwok@v$KWOK"
  gobuild -ldflags "-s -w" -o "$1/kwok" "$module/cmd/kwok"
  cp -r "$(go list -m -f '{{.Dir}}' $module)/kustomize" "$1/kustomize"
  chmod -R u+w "$1/kustomize"
}

fake-dra() { # asked for by its tests alone
  cp "$HERE/fake_dra.go" main.go
  goget "k8s.io/dynamic-resource-allocation@v0.${KUBERNETES#1.}"
  nice -n 19 go mod tidy -e
  gobuild -ldflags "-s -w" -o "$1/fake-dra" .
}

fake-gpu() {
  cp "$HERE/fake_gpu.go" main.go
  goget "k8s.io/kubelet@v0.${KUBERNETES#1.}"
  nice -n 19 go mod tidy -e
  gobuild -ldflags "-s -w" -o "$1/fake-gpu" .
}

[ $# -gt 0 ] || set -- kubernetes etcd coredns argo helm minio fake-gpu
mkdir -p "$CACHE"
for name; do
  target=$(at "$name")
  [ ! -d "$target" ] || continue
  need_go
  exec 9>"$CACHE/.building-$name" && flock 9 # two at once would do the same work twice
  [ ! -d "$target" ] || continue
  say "building $(basename "$target")"
  work=$(mktemp -d "$CACHE/.work-XXXXXX")
  trap 'rm -rf "$work"' EXIT
  mkdir "$work/bin" "$work/module"
  set +e # as part of a condition the function would go on after a failed command
  (set -e; cd "$work/module"; go mod init build.invalid/cluster; "$name" "$work/bin") >"$work/log" 2>&1
  status=$?
  set -e
  [ $status = 0 ] || { tail -30 "$work/log" >&2; die "building $name failed"; }
  mv "$work/bin" "$target"
  rm -rf "$work"
  say "built $(du -sh "$target" | cut -f1) in $target"
done
