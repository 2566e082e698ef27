#!/usr/bin/env bash
# MPICH's mpiexec (Hydra), with mpi4py in the environment. INTERFACE=eth0: the network by which the hosts are reached.
set -euo pipefail
# shellcheck source=launch/multinode/hosts.sh
. "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"
check_arguments "bash launch/multinode/mpich.sh HOSTFILE SCRIPT ARGUMENTS..." 2 "$@"

machines=$(mktemp)
trap 'rm -f "$machines"' EXIT
list_hosts "$1" | awk '{ print $1 ":" $2 }' >"$machines" # Hydra's own format
options=()
if [ -n "${INTERFACE:-}" ]; then
    options+=(-iface "$INTERFACE")
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$INTERFACE}
fi
mpiexec -f "$machines" -n "$(count_slots "$1")" "${options[@]}" -genvall python "${@:2}"
