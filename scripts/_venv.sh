# Sourced by the other scripts: creates .venv, installs this tree into it, and activates it.
#
#   venv_ready [extra]    extra: a pip extra, e.g. "test"
#
# Fast while the packaging files and the compiled sources are unchanged.

venv_ready() {
    local extra="${1:-}" root stamp now spec
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    mkdir -p "$root/.venv"
    (
        flock 9
        if [ ! -x "$root/.venv/bin/python" ]; then
            _venv_create "$root" || exit 1
        fi
        # The stamp of the larger install also covers the smaller one.
        now="$(_venv_fingerprint "$root")"
        stamp="$root/.venv/.installed${extra:+-$extra}"
        if [ "$(cat "$stamp" 2>/dev/null)" != "$now" ] &&
            ! { [ -z "$extra" ] && [ "$(cat "$root/.venv/.installed-test" 2>/dev/null)" = "$now" ]; }; then
            spec="$root${extra:+[$extra]}"
            echo "scripts: installing into .venv (a minute the first time)" >&2
            "$root/.venv/bin/python" -m pip install -q --disable-pip-version-check -e "$spec" >&2 || exit 1
            _venv_fingerprint "$root" >"$stamp" # computed again: the extensions exist now
        fi
    ) 9>"$root/.venv/.lock" || return
    # shellcheck disable=SC1091
    . "$root/.venv/bin/activate"
}

_venv_create() {
    local python="${PYTHON:-python3}"
    if ! "$python" -m venv "$1/.venv" >/dev/null 2>&1; then
        # Debian and Ubuntu package ensurepip and the headers for extensions separately.
        echo "scripts: installing python3-venv, python3-dev and g++" >&2
        [ "$(id -u)" = 0 ] && sudo=() || sudo=(sudo)
        "${sudo[@]}" apt-get update -qq >&2 || return
        "${sudo[@]}" apt-get install -qq -y python3-venv python3-dev g++ >&2 || return
        "$python" -m venv --clear "$1/.venv"
    fi
}

_venv_fingerprint() {
    (
        cd "$1" || exit
        cat pyproject.toml setup.py
        find dynamo/_fast -type f \( -name '*.pyx' -o -name '*.pxd' -o -name '*.hpp' -o -name '*.h' \) |
            LC_ALL=C sort | xargs -r cat
        [ -x .venv/bin/python ] && .venv/bin/python -V
        find dynamo/_fast -name '*.so' | LC_ALL=C sort
    ) | sha256sum | cut -d' ' -f1
}
