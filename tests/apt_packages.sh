# Install Debian's packages for the tests of the script that sources this file, or skip them.

# install_or_skip WHAT TESTS PACKAGE…: without apt-get or the permission to use it, the script says that WHAT is not
# installed and that TESTS are skipped, and succeeds. Sets `as_root`, the command that gives root's permissions.
install_or_skip() {
    local what=$1 tests=$2 reason=""
    shift 2
    as_root=()
    if ! command -v apt-get > /dev/null; then
        reason="no apt-get"
    elif [ "$(id -u)" != 0 ]; then
        as_root=(sudo -n)
        sudo -n true 2> /dev/null || reason="neither root nor sudo"
    fi
    local install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@")
    if [ -z "$reason" ]; then
        "${install[@]}" || { "${as_root[@]}" apt-get update -q && "${install[@]}"; } || reason="apt-get failed"
    fi
    if [ -n "$reason" ]; then
        echo "$what is not installed ($reason): $tests are skipped" >&2
        exit 0
    fi
}
