# Sourced by the other scripts: creates .venv, installs this tree and its lab/ into it, and activates
# it.
#
#   venv_ready [extra]    extra: a pip extra, e.g. "test"
#
# Fast while the packaging files and the compiled sources are unchanged.

venv_ready() {
    local extra="${1:-}" root stamp now build packages
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    mkdir -p "$root/.venv"
    (
        flock 9
        # The stamp of the larger install also covers the smaller one.
        now="$(_venv_fingerprint "$root")"
        stamp="$root/.venv/.installed${extra:+-$extra}"
        if [ "$(cat "$stamp" 2>/dev/null)" != "$now" ] &&
            ! { [ -z "$extra" ] && [ "$(cat "$root/.venv/.installed-test" 2>/dev/null)" = "$now" ]; }; then
            _venv_create "$root" || exit 1
            echo "scripts: installing into .venv; compiling costs 75 s of CPU time, once for all" >&2
            # pip shows no output of a build: setup.py writes its progress to our terminal.
            export DYNAMO_PROGRESS="/proc/$BASHPID/fd/2"
            mapfile -t packages < <(_venv_packages "$root" dependencies ${extra:+"$extra"})
            if [ -n "$extra" ] && [ "$(cat "$root/.venv/.installed" 2>/dev/null)" = "$now" ]; then
                # The package is built: its extra adds packages alone.
                _venv_pip "$root" "${packages[@]}" >&2 || exit 1
            elif [ -z "$extra" ] && _venv_locked "$root" >&2; then
                _venv_pip "$root" --no-deps --no-build-isolation -e "$root" -e "$root/lab" >&2 || exit 1
            else
                # Packages arrive while the extensions are compiled: each takes half a minute.
                mapfile -t build < <(_venv_packages "$root" build)
                _venv_pip "$root" "${build[@]}" >&2 || exit 1
                _venv_pip "$root" "${packages[@]}" >&2 &
                _venv_pip "$root" --no-deps --no-build-isolation -e "$root" -e "$root/lab" >&2 ||
                    { kill "$!" 2>/dev/null; exit 1; }
                wait "$!" || exit 1
            fi
            # pip would compile all of it on one core. Of the packages of an extra, tests use a third.
            [ -n "$extra" ] ||
                "$root/.venv/bin/python" -m compileall -q -j 0 "$root/.venv/lib" >/dev/null || true
            _venv_fingerprint "$root" >"$stamp" # computed again: the extensions exist now
        fi
    ) 9<"$root/.venv" || return
    # shellcheck disable=SC1091
    . "$root/.venv/bin/activate"
}

# Install the dependencies of requirements.lock, by their hashes.
_venv_locked() {
    _venv_pip "$1" --require-hashes -r "$1/requirements.lock" && return
    echo "scripts: requirements.lock has no packages for this Python and machine, or they were" >&2
    echo "  changed: installing what pyproject.toml allows, without checking hashes" >&2
    return 1
}

# Print the packages of each group that follows: "build", "dependencies", or an extra with the extras
# that it contains.
_venv_packages() {
    local root="$1"
    shift
    "$root/.venv/bin/python" -c '
import sys, tomllib
file = tomllib.load(open(sys.argv[1], "rb"))
project = file["project"]
groups = project["optional-dependencies"] | {
    "build": file["build-system"]["requires"], "dependencies": project["dependencies"]
}
def packages(group):
    for package in groups[group]:
        name, _, extras = package.partition("[")
        if name != project["name"]:
            yield package
        for inner in extras.rstrip("]").split(",") if name == project["name"] else ():
            yield from packages(inner)
print("\n".join(package for group in sys.argv[2:] for package in packages(group)))' \
        "$root/pyproject.toml" "$@"
}

_venv_pip() {
    local root="$1"
    shift
    "$root/.venv/bin/python" -m pip install -q --disable-pip-version-check --no-compile "$@"
}

# Check what a build needs, and create .venv if it is missing, incomplete or of an older Python.
_venv_create() {
    local python="$1/.venv/bin/python"
    # venv writes activate last, after it has installed pip.
    if [ ! -e "$1/.venv/bin/activate" ] || [ "$(_venv_version "$python")" != new ]; then
        [ ! -e "$python" ] ||
            echo "scripts: .venv is incomplete or not of Python 3.11 or newer: making it again" >&2
        python="$(_venv_python)" || return
        _venv_check "$python" ensurepip && "$python" -m venv --clear "$1/.venv"
    else
        _venv_check "$python"
    fi
}

# Print the Python to use: $PYTHON, else the first one that is new enough.
_venv_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if [ "$(_venv_version "$name")" = new ]; then
            echo "$name"
            return
        fi
    done
    name="${PYTHON:-python3}"
    _venv_advise "Python 3.11 or newer is needed; $name is $("$name" -V 2>&1 | tail -1)" \
        python3.11 python3.11-venv python3.11-dev
    echo "  PYTHON=python3.11 $0" >&2
    return 1
}

_venv_version() {
    "$1" -c 'import sys; print("new" if sys.version_info >= (3, 11) else "old")' 2>/dev/null
}

# Check that Python $1 can compile extensions and, with $2, create environments.
_venv_check() {
    local lacking=() packages=() name="python3" compiler headers ensurepip
    { read -r compiler; read -r headers; read -r ensurepip; } < <("$1" -c '
import importlib.util, os, sysconfig
print((os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()[0])
print(os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
print(importlib.util.find_spec("ensurepip") is not None)')
    case "$1" in */.venv/*) ;; *) name="$(basename "$1")" ;; esac
    command -v "$compiler" >/dev/null || { lacking+=("the C++ compiler $compiler") && packages+=(g++); }
    [ "$headers" = True ] || { lacking+=("Python.h") && packages+=("$name-dev"); }
    [ -z "${2:-}" ] || [ "$ensurepip" = True ] || { lacking+=("ensurepip") && packages+=("$name-venv"); }
    [ "${#lacking[@]}" = 0 ] && return
    if [ -z "${3:-}" ] && _venv_install "${packages[@]}"; then
        _venv_check "$1" "${2:-}" installed # once: what is missing still is not in the packages
        return
    fi
    _venv_advise "missing: $(printf '%s, ' "${lacking[@]}" | sed 's/, $//')" "${packages[@]}"
    echo "  $0" >&2
    return 1
}

# Install the Debian packages that follow, where this needs no password.
_venv_install() {
    local sudo=()
    command -v apt-get >/dev/null || return
    if [ "$(id -u)" != 0 ]; then
        sudo=(sudo -n)
        "${sudo[@]}" true 2>/dev/null || return
    fi
    echo "scripts: installing $*" >&2
    "${sudo[@]}" apt-get install -qq -y "$@" >/dev/null 2>&1 && return
    "${sudo[@]}" apt-get update -qq >&2 && "${sudo[@]}" apt-get install -qq -y "$@" >&2
}

# Print the problem $1 and the command that installs the Debian packages that follow.
_venv_advise() {
    local problem="$1"
    shift
    echo "scripts: $problem" >&2
    if command -v apt-get >/dev/null; then
        echo "  sudo apt-get install -y $*" >&2
    else
        echo "  install what Debian has as: $*" >&2
    fi
}

_venv_fingerprint() {
    (
        cd "$1" || exit
        cat pyproject.toml setup.py requirements.lock lab/pyproject.toml
        find dynamo/_fast -type f \( -name '*.pyx' -o -name '*.pxd' -o -name '*.hpp' -o -name '*.h' \) |
            LC_ALL=C sort | xargs -r cat
        [ -x .venv/bin/python ] && .venv/bin/python -V
        find dynamo/_fast -name '*.so' | LC_ALL=C sort
    ) | sha256sum | cut -d' ' -f1
}
