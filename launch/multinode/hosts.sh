# shellcheck shell=bash
# Sourced by the scripts beside it: what they read from DeepSpeed's hostfile, lines of HOST slots=N.

# check_arguments USAGE NUMBER ARGUMENTS...: at least NUMBER of them, the first a hostfile.
check_arguments() {
    local usage=$1 number=$2
    shift 2
    if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
        echo "$usage"
        exit 0
    fi
    if [ $# -lt "$number" ]; then
        echo "$# arguments are given, expected at least $number: $usage" >&2
        exit 2
    fi
    if [ ! -f "$1" ]; then
        echo "$1 is not a file; expected a hostfile of lines such as \"node1 slots=8\"" >&2
        exit 2
    fi
}

# "HOST SLOTS" of each host.
list_hosts() {
    sed -E 's/#.*//; s/^[[:space:]]+//; s/[[:space:]]+slots=([0-9]+)[[:space:]]*$/ \1/; /^$/d' "$1"
}

count_hosts() {
    list_hosts "$1" | wc -l
}

count_slots() {
    list_hosts "$1" | awk '{ total += $2 } END { print total + 0 }'
}
