# Sourced by scripts/test: finds etcd, nats-server, prometheus and kubectl, or unpacks Debian's packages
# into build/debian; finds Chromium, zsh and fish, or installs them.
#
# Servers are unpacked, not installed: installing one would start it on this machine. The tests
# start their own servers on free loopback ports. Chromium and shells start nothing, and need other
# packages. Without a package tests skip and name it.

servers_ready() {
    local root target package
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    target="$root/build/debian"
    for package in etcd-server:etcd nats-server:nats-server prometheus:prometheus \
        kubernetes-client:kubectl; do
        if ! _server_there "${package#*:}" "$target"; then
            echo "scripts: unpacking ${package%:*} into build/debian for the tests" >&2
            _server_unpack "${package%:*}" "$target" ||
                echo "scripts: no ${package%:*}; the tests that need it will be skipped" >&2
        fi
    done
}

chromium_ready() {
    local command
    for command in chromium chromium-browser chrome; do
        if command -v "$command" >/dev/null; then return; fi
    done
    _package_install chromium "the tests of the web page"
}

shells_ready() {
    local shell
    for shell in zsh fish; do
        command -v "$shell" >/dev/null || _package_install "$shell" "the tests of its completion"
    done
}

_package_install() {
    local sudo=()
    [ "$(id -u)" = 0 ] || sudo=(sudo -n)
    echo "scripts: installing $1 for $2" >&2
    _apt_install "$1" "${sudo[@]}" || echo "scripts: no $1; $2 will be skipped" >&2
}

_apt_install() {
    local install=(timeout 300 apt-get -qq install -y --no-install-recommends "$1")
    shift
    command -v apt-get >/dev/null || return
    [ "$#" = 0 ] || "$@" true 2>/dev/null || return
    "$@" "${install[@]}" >/dev/null 2>&1 && return
    "$@" timeout 120 apt-get update -qq >&2
    "$@" "${install[@]}" >&2
}

_server_there() {
    PATH="$PATH:/usr/sbin:/usr/local/sbin:$2/usr/bin:$2/usr/sbin" command -v "$1" >/dev/null
}

_server_unpack() {
    local work
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return
    work="$(mktemp -d)" || return
    (
        cd "$work" || exit
        # As root, apt-get would download as a user that may not write here.
        download=(timeout 120 apt-get -qq -o APT::Sandbox::User=root download "$1")
        if ! "${download[@]}" >/dev/null 2>&1; then
            [ "$(id -u)" != 0 ] || timeout 120 apt-get update -qq >&2
            "${download[@]}" >&2 || exit
        fi
        mkdir -p "$2" && dpkg-deb -x ./*.deb "$2"
    )
    local status=$?
    rm -rf "$work"
    return $status
}
