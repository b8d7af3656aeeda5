#!/usr/bin/env bash
# Installs packages on Debian and Ubuntu, as root or by sudo. Elsewhere, or without the right to, it says which to install and
# fails. A lock makes parallel parts of the check wait for each other.
#   scripts/apt.sh PACKAGE...
set -euo pipefail

die() { echo "please install: $*" >&2; exit 1; }

command -v apt-get >/dev/null || die "$@"
as_root=()
if ((EUID != 0)); then
    command -v sudo >/dev/null || die "$@"
    as_root=(sudo)
fi
exec 9<"${BASH_SOURCE[0]}"
flock 9
# A third party's list that cannot be fetched does not matter: the install fails if something is missing.
"${as_root[@]}" apt-get update -qq || true
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" >/dev/null || die "$@"
