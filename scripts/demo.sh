#!/bin/sh
# A fleet of sixteen on this machine after an upgrade to CUDA 13 and back: who is sick is found, mended and
# proven; one host goes back to what it was, one says no, and both are mended once their trouble is gone.
# The lab has its own state folder here, so that a lab of yours is neither used nor taken down.
set -eu

# Smaller for whoever has less time: DEMO_HOSTS='gpu[01-04]' DEMO_SICK='gpu[02-04]' …
all=${DEMO_HOSTS:-gpu[01-16]}
sick=${DEMO_SICK:-gpu[03,07,09,12,14]}
broken=${DEMO_BROKEN:-gpu09} # torch will not load there once its own libraries are back
taken=${DEMO_TAKEN:-gpu14}   # somebody else's job runs there

work=$(mktemp -d "${TMPDIR:-/tmp}/fleetfix-demo.XXXXXX")
export XDG_STATE_HOME="$work/state" XDG_CONFIG_HOME="$work/config"
unset FLEETFIX_INVENTORY FLEETFIX_STATE_DIR
cd "$work"

finish() {
    code=$?
    trap - EXIT
    trap '' INT TERM HUP # a second ^C must not leave half of it behind
    fleetfix lab down >/dev/null 2>&1 || echo "the lab is still up: XDG_STATE_HOME=$XDG_STATE_HOME fleetfix lab down" >&2
    cd /
    rm -rf "$work"
    exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

bold='' faint='' plain=''
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
    bold=$(printf '\033[1m') faint=$(printf '\033[2m') plain=$(printf '\033[0m')
fi

# What the next command is about: one line each, 80 columns at most.
tell() {
    printf '\n'
    for line in "$@"; do printf '%s# %s%s\n' "$faint" "$line" "$plain"; done
}

# `expect CODE COMMAND`: show a command, run it, and end the demo where it ends in another way.
expect() {
    wanted=$1
    shift
    printf '%s$' "$bold"
    for word in "$@"; do
        case $word in
            *[!A-Za-z0-9_./@:=%,+-]*) printf " '%s'" "$word" ;;
            *) printf ' %s' "$word" ;;
        esac
    done
    printf '%s\n' "$plain"
    code=0
    "$@" || code=$?
    if [ "$code" = "$wanted" ]; then return 0; fi
    if [ "$code" = 130 ]; then exit 130; fi
    echo "demo: exit $code, where $wanted was to be" >&2
    exit 1
}

tell "Sixteen GPU hosts, training. On some, wheels of CUDA 13 were left in the" \
     "environment: they train at 12.8K tok/s instead of 20K, and nothing says why."
expect 0 fleetfix lab up --hosts "$all" --contaminated "$sick"

tell "Two of these have more wrong with them than that."
expect 0 fleetfix lab break "$broken" --fault load_fails
expect 0 fleetfix lab break "$taken" --fault foreign_job

tell "What would be done? A plan asks every host and changes none. That $taken may" \
     "not be touched is exit 2, and is said first."
expect 2 fleetfix plan purge-cu13 --hosts "$all" -i lab --max-unreachable 2 --batch 3

tell "Do it: one host alone, then three at a time. Well hosts are not touched." \
     "$broken goes back to what it was, $taken is left alone; that is exit 2."
expect 2 fleetfix run purge-cu13 --hosts "$all" -i lab --max-unreachable 2 --batch 3 --yes

tell "What happened on $broken, step by step?"
expect 0 fleetfix show last "$broken"

tell "For those who were not there: one page, as .html or .md; here a part of it."
expect 0 fleetfix report last -o report.md
expect 0 sed -n '/^## How the hosts/,/^## Speed/p' report.md

tell "Their trouble is taken away. Now only the hosts that did not end well in the" \
     "last run; the repair is proven by now, so both at once."
expect 0 fleetfix lab heal "$broken,$taken"
expect 0 fleetfix run purge-cu13 --hosts @failed:last -i lab --canary 0 --batch 2 --yes

tell "Once more over all: nothing to do, no job disturbed, every speed measured."
expect 0 fleetfix run purge-cu13 --hosts "$all" -i lab --yes

tell "All of it is in the journal of this machine, and in each host's own log."
expect 0 fleetfix runs
expect 0 fleetfix lab down
