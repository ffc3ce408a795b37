# Sourced after env.sh by whatever builds Go programs: need_go puts a Go that is new enough on the PATH, fetched once.
go_is_enough() {
  local have
  have=$(go env GOVERSION 2>/dev/null) && [ "$(printf '%s\n' "${GO%.*}" "${have#go}" | sort -V | head -1)" = "${GO%.*}" ]
}
need_go() { # any Go can fetch a newer one, which is a module too; Debian's does not do so by itself yet
  local at=$CACHE/go-$GO module=golang.org/toolchain@v0.0.1-go$GO.linux-$(dpkg --print-architecture) file
  ! go_is_enough || return 0
  export GOTOOLCHAIN=local PATH=$at/bin:$PATH
  [ ! -d "$at" ] || return 0
  say "fetching Go $GO"
  command -v go >/dev/null || install_packages golang-go
  retry go mod download "$module"
  rm -rf "$at.new"
  cp -r "$(go env GOMODCACHE)/$module" "$at.new"
  chmod -R u+w "$at.new"
  chmod +x "$at.new"/bin/* "$at.new"/pkg/tool/*/*
  find "$at.new" -name _go.mod | while read -r file; do mv "$file" "${file%_go.mod}go.mod"; done # modules hold no modules
  mv "$at.new" "$at"
}
