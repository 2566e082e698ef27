#!/usr/bin/env bash
# torchrun: start it on every host, with the host's place in the hostfile, counted from 0. All hosts have as many slots.
set -euo pipefail
# shellcheck source=launch/multinode/hosts.sh
. "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"
check_arguments "bash launch/multinode/torchrun.sh HOSTFILE NODE_RANK ADDRESS_OF_NODE_0 SCRIPT ARGUMENTS..." 4 "$@"

slots=$(list_hosts "$1" | awk '{ print $2 }' | sort -u)
if [ "$(wc -l <<<"$slots")" != 1 ]; then
    echo "the hosts of $1 have different slots, expected the same; torchrun.sh starts as many ranks on each" >&2
    exit 2
fi
exec torchrun --nnodes "$(count_hosts "$1")" --nproc_per_node "$slots" --node_rank "$2" --master_addr "$3" \
    --master_port "${MASTER_PORT:-29500}" "${@:4}"
