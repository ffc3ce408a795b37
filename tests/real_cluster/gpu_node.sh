#!/usr/bin/env bash
# gpu_node.sh: the test cluster on a machine with a GPU that has no network and no containers' programs.
#
#   gpu_node.sh pack FOLDER   where the cluster was built: writes all that the other machine needs, in pieces of 60 MiB
#   gpu_node.sh up FOLDER     on the other machine, as root: unpacks the pieces, starts the cluster, makes the project's
#                             images from the machine's own /usr and /opt, and installs the chart
#   gpu_node.sh run           runs a DAG on it and tries its walls
#
#   ENVIRONMENT=/opt/torch/.venv  a virtual environment with PyTorch, transformers and numpy
#   PYTHON=3.12                   its version, for `pack`
#   DEVICE=cuda                   or cpu: what solutions are judged on
#   GPU_FILES="/dev/nvidia0 ..."  device files that a container with a GPU gets
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ROOT=$(cd "$HERE/../.." && pwd)
ENVIRONMENT=${ENVIRONMENT:-/opt/torch/.venv} PYTHON=${PYTHON:-3.12} DEVICE=${DEVICE:-cuda}
GPU_FILES=${GPU_FILES-/dev/nvidia0 /dev/nvidiactl /dev/nvidia-uvm /dev/nvidia-uvm-tools}
APP=$CACHE/app # the package and its requirements, as an environment of Python; images hold a copy at /app
NAMESPACE=gpu
export GPU_FILES DEVICE NAMESPACE CLUSTER

# ---------------------------------------------------------------------------------------------------------------- pack

squeeze() { # name file...: the files, below $CACHE, as $CACHE/packed/NAME-KEY.tar.xz; made once. Prints the path.
  # One dictionary over all files: programs from the same Go modules share most of their code.
  local name=$1 key made
  shift
  key=$(cd "$CACHE" && stat -c '%n %s %Y' "$@" | sha256sum | cut -c1-12)
  made=$CACHE/packed/$name-$key.tar.xz
  mkdir -p "$CACHE/packed"
  [ -f "$made" ] || {
    tar -C "$CACHE" -cf - "$@" | nice -n 19 xz -c --x86 --lzma2=preset=7,dict=512MiB >"$made.new"
    mv "$made.new" "$made"
  }
  echo "$made"
}

system_files() { # FOLDER: Debian's files that a machine without containers lacks, with their libraries
  local file name
  for name in containerd containerd-shim-runc-v2 ctr runc ip conntrack openssl sysctl xtables-nft-multi; do
    file=$(PATH=/usr/sbin:/usr/bin command -v "$name") || die "$name is missing: make cluster-up installs it."
    echo "$(readlink -f "$file")"
  done >"$work/programs"
  find /usr/lib/cni ! -type d >>"$work/programs"
  find /usr/lib/x86_64-linux-gnu/xtables -name '*.so' >>"$work/programs"
  # glibc is the machine's own: a newer one runs what was linked with an older one.
  xargs -n1 ldd <"$work/programs" 2>/dev/null | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' | sort -u |
    grep -Ev '/(libc|libm|libdl|libpthread|librt|libresolv|ld-linux-x86-64)\.so' >"$work/libraries" || true
  mkdir -p "$1/usr/sbin" "$1/usr/lib/x86_64-linux-gnu" "$1/usr/lib/ssl"
  while read -r file; do mkdir -p "$1/${file%/*}" && cp -L "$file" "$1/$file"; done <"$work/programs"
  while read -r file; do cp -L "$file" "$1/usr/lib/x86_64-linux-gnu/"; done <"$work/libraries"
  for name in iptables ip6tables; do
    for file in "$name" "$name-save" "$name-restore"; do ln -s xtables-nft-multi "$1/usr/sbin/$file"; done
  done
  cp -L /etc/ssl/openssl.cnf "$1/usr/lib/ssl/openssl.cnf"
}

wheels() { # FOLDER: what the package needs beyond PyTorch, transformers and numpy, in the versions of requirements.lock
  "$ROOT/.venv/bin/python" "$HERE/gpu_images.py" requirements >"$work/requirements"
  mkdir -p "$1"
  grep -v '^antlr4' "$work/requirements" >"$work/binary"
  retry "$ROOT/.venv/bin/python" -m pip download -q --no-deps --only-binary :all: --implementation cp \
    --python-version "$PYTHON" --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --dest "$1" -r "$work/binary"
  grep '^antlr4' "$work/requirements" >"$work/source" # published as source alone; pure Python
  retry "$ROOT/.venv/bin/python" -m pip wheel -q --no-deps --wheel-dir "$1" -r "$work/source"
}

pack() { # FOLDER
  local kubernetes archive names=()
  mkdir -p "$1"
  [ -z "$(ls -A "$1")" ] || die "$1 is not empty."
  "$HERE/build.sh" kubernetes etcd coredns argo helm minio fake-gpu
  kubernetes=$(basename "$(at kubernetes)")
  for archive in $("$HERE/images.sh"); do names+=("images/$(basename "$archive")"); done
  archive=$(ls "$CACHE/argo-manifests-$ARGO-"*.yaml) || die "Start the cluster here once: make cluster-up"
  squeeze kubernetes "$kubernetes"/{kube-apiserver,kube-controller-manager,kubelet,kube-scheduler,kube-proxy,kubectl} \
    "$(basename "$(at helm)")/helm" >"$work/one" &
  squeeze images "${names[@]}" "$(basename "$(at etcd)")/etcd" "$(basename "$(at minio)")/minio" \
    "$(basename "$archive")" >"$work/two" &
  system_files "$work/system"
  (cd "$work/system" && find . ! -type d | sed 's,^\./,,' | tar -cf - -T -) | xz -6 >"$work/system.tar.xz"
  wheels "$work/wheels"
  tar -C "$work" -cf - wheels | xz -0 >"$work/wheels.tar.xz"
  tar -C "$CACHE" -cf - "$(basename "$(at fake-gpu)")/fake-gpu" | xz -6 >"$work/plugin.tar.xz"
  wait
  ln -s "$(cat "$work/one")" "$work/kubernetes.tar.xz"
  ln -s "$(cat "$work/two")" "$work/images.tar.xz"
  tar -C "$work" -chf - kubernetes.tar.xz images.tar.xz system.tar.xz wheels.tar.xz plugin.tar.xz |
    split -b 60M -d - "$1/piece-"
  (cd "$1" && sha256sum piece-* >sums)
  (cd "$work" && ls -lL ./*.tar.xz | awk '{ printf "%6.1f MiB %s\n", $5 / 1048576, $9 }')
  say "packed $(du -sh "$1" | cut -f1) in $(ls "$1"/piece-* | wc -l) pieces"
}

# ------------------------------------------------------------------------------------------------------------------ up

unpack() { # archive folder option...
  local archive=$1 folder=$2
  shift 2
  mkdir -p "$folder"
  { if command -v xz >/dev/null; then xz -dc "$archive"; else
      python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer)' "$archive"
    fi; } | tar -C "$folder" -xf - "$@"
}

check() { # says at once all that the machine lacks, before anything waits for it
  local lacks=0
  try() { # what command
    unshare --net --mount --fork bash -euc "$2" >"$work/try" 2>&1 && return
    echo "lacks $1: $(head -1 "$work/try")" >&2
    lacks=1
  }
  for name in unshare nsenter mount flock setsid sha256sum awk openssl sysctl conntrack containerd runc ctr; do
    command -v "$name" >/dev/null || { echo "lacks $name" >&2; lacks=1; }
  done
  try "/usr/bin/python3 with ssl" "/usr/bin/python3 -c 'import ssl, http.client'"
  try "bridges" "ip link add b0 type bridge"
  try "virtual cables" "ip link add v0 type veth peer name v1"
  try "filters of bridged packets" "ip link add b0 type bridge; sysctl -qw net.bridge.bridge-nf-call-iptables=1"
  mkdir "$work"/{a,b,c,d}
  try "overlayfs" "cd $work; mount -t overlay -o lowerdir=a,upperdir=b,workdir=c none d"
  try "a mangle table" "iptables -t mangle -A POSTROUTING -o eth0 -m conntrack --ctstate NEW -j DROP"
  try "marks" "iptables -t nat -A POSTROUTING -m mark --mark 1/1 -m comment --comment x -j MASQUERADE --random-fully"
  try "translation" "iptables -t nat -A PREROUTING -p tcp -j DNAT --to-destination 10.0.0.1:80"
  try "choice by chance" "iptables -t nat -A OUTPUT -m statistic --mode random --probability 0.5 -j RETURN"
  try "address types" "iptables -t nat -A OUTPUT -m addrtype --dst-type LOCAL -j RETURN"
  try "ip6tables" "ip6tables -P FORWARD DROP"
  [ $lacks = 0 ] || die "The cluster cannot stand here."
}

app() { # the package with its wheels, on top of the environment; sandbox workers find it without a variable
  local base version site about wheel
  base=$(readlink -f "$ENVIRONMENT/bin/python3")
  version=$("$base" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  site=$APP/lib/$version/site-packages
  rm -rf "$APP" && mkdir -p "$APP/bin" "$site"
  ln -s "$base" "$APP/bin/python3"
  printf 'home = %s\ninclude-system-site-packages = false\n' "${base%/*}" >"$APP/pyvenv.cfg"
  for wheel in "$CACHE"/wheels/*.whl; do "$base" -m zipfile -e "$wheel" "$site"; done
  cp -r "$ROOT/cuda_agent" "$site/" && cp -r "$ROOT/conf" "$site/cuda_agent/conf"
  about=$site/cuda_agent-$(project_version).dist-info
  mkdir "$about"
  printf 'Metadata-Version: 2.1\nName: cuda-agent\nVersion: %s\n' "$(project_version)" >"$about/METADATA"
  echo "$ENVIRONMENT/lib/$version/site-packages" >"$site/environment.pth"
  chmod -R a+rX "$APP"
}
project_version() { sed -n 's/^version = "\(.*\)"/\1/p' "$ROOT/pyproject.toml"; }

trees() { # the folders that pods see, and those mounted below them, as the driver's libraries: a claim holds one mount
  local folder
  { printf '%s\n' /usr /opt
    awk '$2 ~ /^\/(usr|opt)\// { print $2 }' /proc/mounts | while read -r folder; do
      [ ! -d "$folder" ] || echo "$folder"
    done
    case $ENVIRONMENT in /usr/* | /opt/*) ;; *) readlink -f "$ENVIRONMENT" ;; esac; } | sort -u
}

up() { # FOLDER
  [ "$(id -u)" = 0 ] || die "Needs root."
  (cd "$1" && sha256sum -c --quiet sums) || die "A piece is not whole."
  cat "$1"/piece-* | tar -C "$work" -xf -
  unpack "$work/system.tar.xz" / --skip-old-files # the machine's own files stay
  for name in kubernetes images plugin wheels; do unpack "$work/$name.tar.xz" "$CACHE"; done
  say "unpacked"
  check
  local file present=()
  for file in $GPU_FILES; do [ ! -c "$file" ] || present+=("$file"); done
  [ ${#present[@]} -gt 0 ] || die "None of these device files is here: $GPU_FILES"
  PACKED=1 GPUS=1 GPU_FILES=${present[*]} "$HERE/up.sh"
  echo "${present[*]}" >"$STATE/gpu-files"
  app
  trees >"$STATE/trees"
  "$APP/bin/python3" "$HERE/gpu_images.py" images "$work/made" "$APP" "$STATE/trees" "$(at minio)/minio" \
    "$(project_version)"
  "$HERE/load.sh" "$work"/made/*.tar >/dev/null
  say "made the project's images"
  kubectl get namespace "$NAMESPACE" >/dev/null 2>&1 || kubectl create namespace "$NAMESPACE" >/dev/null
  kubectl label --overwrite namespace "$NAMESPACE" pod-security.kubernetes.io/enforce=restricted >/dev/null
  while read -r file; do
    "$HERE/environment.sh" "$NAMESPACE" "$(tr / - <<<"tree$file" | tr -d .)" "$file" >/dev/null
  done <"$STATE/trees"
  await 60 "the service account" kubectl -n "$NAMESPACE" get serviceaccount default
  node_program install
}

node_program() {
  SSL_CERT_FILE=$(echo "$APP"/lib/*/site-packages/certifi/cacert.pem) PYTHONPATH=$ROOT:$HERE \
    PYTHONDONTWRITEBYTECODE=1 PATH=$APP/bin:$PATH "$APP/bin/python3" "$HERE/gpu_run.py" "$@"
}

work=$(mktemp -d /var/tmp/gpu-node-XXXXXX)
trap 'rm -rf "$work"' EXIT
case ${1:-} in
  pack | up) [ $# = 2 ] || die "gpu_node.sh $1 FOLDER"; "$1" "$(readlink -f "$2")" ;;
  run) node_program run ;;
  *) die "gpu_node.sh pack FOLDER | up FOLDER | run" ;;
esac
