#!/usr/bin/env bash
# deepspeed without ssh: start it on every host, with the host's place in the hostfile, counted from 0.
set -euo pipefail
# shellcheck source=launch/multinode/hosts.sh
. "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"
check_arguments "bash launch/multinode/no_ssh.sh HOSTFILE NODE_RANK ADDRESS_OF_NODE_0 SCRIPT ARGUMENTS..." 4 "$@"

exec tempo-megatron launch deepspeed --no_ssh --hostfile "$1" --node_rank "$2" --master_addr "$3" \
    --master_port "${MASTER_PORT:-29500}" "${@:4}"
