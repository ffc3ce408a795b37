#!/usr/bin/env bash
# load.sh ARCHIVE...: gives the running cluster images, as `buildah push NAME docker-archive:ARCHIVE:NAME` writes them.
# Names need a host part, `localhost/NAME:TAG`, and pods an imagePullPolicy other than Always: there is no registry.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
outer >/dev/null || die "No cluster is up: make cluster-up"
for archive; do images import "$archive"; done
