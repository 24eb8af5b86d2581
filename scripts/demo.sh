#!/bin/sh
# A fleet of three on this machine, slow as after an upgrade to CUDA 13 and back: mended, and proven.
# The lab has its own state folder here, so that a lab of yours is neither used nor taken down.
set -eu

work=$(mktemp -d "${TMPDIR:-/tmp}/fleetfix-demo.XXXXXX")
export XDG_STATE_HOME="$work/state" XDG_CONFIG_HOME="$work/config"
unset FLEETFIX_INVENTORY FLEETFIX_STATE_DIR

finish() {
    code=$?
    trap - EXIT INT TERM HUP
    fleetfix lab down >/dev/null 2>&1 || echo "the lab is still up: XDG_STATE_HOME=$XDG_STATE_HOME fleetfix lab down" >&2
    rm -rf "$work"
    exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

bold='' plain=''
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
    bold=$(printf '\033[1m') plain=$(printf '\033[0m')
fi
say() { printf '\n%s$ %s%s\n' "$bold" "$*" "$plain"; }

say "fleetfix lab up --hosts 'gpu[01-03]'"
fleetfix lab up --hosts 'gpu[01-03]'

say "fleetfix lab status"
fleetfix lab status

say "fleetfix run purge-cu13 --hosts 'gpu[01-03]' -i lab --yes"
fleetfix run purge-cu13 --hosts 'gpu[01-03]' -i lab --yes

say "fleetfix lab status"
fleetfix lab status

say "fleetfix run purge-cu13 --hosts 'gpu[01-03]' -i lab --yes    # again: nothing is touched"
fleetfix run purge-cu13 --hosts 'gpu[01-03]' -i lab --yes

say "fleetfix lab down"
fleetfix lab down
