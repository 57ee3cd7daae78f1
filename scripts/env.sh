# shellcheck shell=bash
# Sourced by the scripts beside it: makes .venv in the checkout when it is missing or older than its pins.

podpipe_fail() {
  printf '%s: %s\n' "${0##*/}" "$1" >&2
  exit 4
}

podpipe_python() { # the first Python that is new enough
  local candidate
  for candidate in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  podpipe_fail "needs Python 3.11 or newer: install it, or name one with PYTHON=/path/to/python3"
}

podpipe_env() {
  local root=$1 wanted python
  local stamp=$root/.venv/.pins
  wanted=$(cat "$root/requirements.txt" "$root/pyproject.toml" | cksum)
  if [[ -x $root/.venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    return
  fi
  if [[ ! -x $root/.venv/bin/python ]]; then
    python=$(podpipe_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      podpipe_fail "$python has no venv module: on Debian and Ubuntu run \`apt-get install python3-venv\`"
    printf 'making .venv with %s\n' "$("$python" -V)" >&2
    "$python" -m venv "$root/.venv" >&2
  fi
  printf 'installing the pinned requirements into .venv (under a minute)\n' >&2
  # Two runs at once would install into each other's half-made folders.
  (
    if command -v flock >/dev/null; then flock 9; fi
    cd "$root" && .venv/bin/python -m pip install --quiet --disable-pip-version-check \
      -r requirements.txt -e '.[dev]' >&2
  ) 9>"$root/.venv/.lock" || {
    printf '%s: installing the requirements failed: see the lines above\n' "${0##*/}" >&2
    exit 1
  }
  printf '%s\n' "$wanted" >"$stamp"
}
