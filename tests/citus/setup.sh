#!/bin/bash
# Install Debian's package postgresql-15, 15.20 or newer, and Citus in it, for the tests on a Citus cluster. Citus is no
# part of this project: it is in shared/citus beside the repository, or in the directory CITUS_DIRECTORY. Without it,
# without apt-get or the permission to use it, these tests are skipped; this script then says so and succeeds.
set -euo pipefail
cd "$(dirname "$0")"
citus=${CITUS_DIRECTORY:-$PWD/../../../shared/citus}
if [ ! -e "$citus/setup.sh" ]; then
    echo "NO TEST WILL RUN ON CITUS: there is no $citus/setup.sh" >&2
    exit 0
fi

# Citus 13.2 uses a symbol that Postgres exports since 15.20.
is_new_enough() {
    local version
    version=$(dpkg-query --show --showformat '${Version}' postgresql-15 2> /dev/null) || return 1
    dpkg --compare-versions "$version" ge 15.20
}

. ../apt_packages.sh
if ! is_new_enough; then
    install_or_skip "Postgres 15" "THE TESTS ON CITUS" postgresql-15
    if ! is_new_enough; then # the lists of packages are older than the security update
        "${as_root[@]}" apt-get update -q
        install_or_skip "Postgres 15.20" "THE TESTS ON CITUS" postgresql-15
    fi
    # The tests start servers of their own.
    "${as_root[@]}" systemctl disable --now postgresql 2> /dev/null || true
fi
if ! is_new_enough; then
    echo "NO TEST WILL RUN ON CITUS: apt-get has no postgresql-15 of version 15.20 or newer (a security update)" >&2
    exit 0
fi
if [ "$(id -u)" = 0 ]; then
    sh "$citus/setup.sh"
else
    sudo -n sh "$citus/setup.sh"
fi
