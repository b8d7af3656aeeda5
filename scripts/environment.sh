# Sourced by scripts/check.sh and scripts/verify.sh: what both set for the programs that they run.
# shellcheck shell=bash

# Without debug information and incremental builds: nothing here needs them, and they cost time and space.
export CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0}
export CARGO_PROFILE_DEV_DEBUG=${CARGO_PROFILE_DEV_DEBUG:-0} CARGO_PROFILE_TEST_DEBUG=${CARGO_PROFILE_TEST_DEBUG:-0}

# Vulkan drivers need one.
if [[ -z ${XDG_RUNTIME_DIR:-} ]]; then
    runtime_folder=$(mktemp -d)
    export XDG_RUNTIME_DIR=$runtime_folder
    # The folder that was made here, whatever the variable says by then.
    trap 'rm -rf "$runtime_folder"' EXIT
fi
