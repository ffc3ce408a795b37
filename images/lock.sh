#!/usr/bin/env bash
# lock.sh: writes what the images install, with hashes of all files of each package: environment.lock (all of
# requirements.lock), mlflow.lock and ray.lock (what these two need, in the same versions). Needs uv; UV="uv" is the command.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
compile() {
  ${UV:-uv} pip compile --quiet --generate-hashes --no-annotate --no-header --python-version 3.11 --python-platform linux "$@"
}
compile --no-deps ../requirements.lock --output-file environment.lock
printf 'mlflow\nboto3\npsycopg2-binary==2.9.11\n' | compile --constraint ../requirements.lock - --output-file mlflow.lock
printf 'ray[default]\n' | compile --constraint ../requirements.lock - --output-file ray.lock
