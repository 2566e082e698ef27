#!/usr/bin/env bash
# Open MPI's mpirun, with mpi4py in the environment (pip install tempo-megatron[mpi]). INTERFACE=eth0 is the network by
# which hosts without a default route or DNS find one another.
set -euo pipefail
# shellcheck source=launch/multinode/hosts.sh
. "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"
check_arguments "bash launch/multinode/openmpi.sh HOSTFILE SCRIPT ARGUMENTS..." 2 "$@"

options=(--bind-to none)
if [ -n "${INTERFACE:-}" ]; then
    # For the messages of mpirun's daemons, which have another name in Open MPI 4, and for the ranks'.
    case $(mpirun --version) in
    *"Open MPI) 4."*) options+=(--mca oob_tcp_if_include "$INTERFACE") ;;
    *) options+=(--prtemca prte_if_include "$INTERFACE") ;;
    esac
    options+=(--mca btl_tcp_if_include "$INTERFACE")
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$INTERFACE}
fi
# mpirun passes on what is named here, and nothing else of this environment.
for name in PATH PYTHONPATH LD_LIBRARY_PATH OMP_NUM_THREADS MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME \
    NCCL_SOCKET_IFNAME NCCL_IB_HCA NCCL_DEBUG DS_ACCELERATOR; do
    [ -z "${!name:-}" ] || options+=(-x "$name")
done
exec mpirun -n "$(count_slots "$1")" --hostfile "$1" "${options[@]}" python "${@:2}"
