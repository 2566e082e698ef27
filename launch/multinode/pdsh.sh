#!/usr/bin/env bash
# deepspeed over ssh and pdsh, from one of the hosts or a login node; the hosts are checked first, a stop saves.
set -euo pipefail
# shellcheck source=launch/multinode/hosts.sh
. "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"
check_arguments "bash launch/multinode/pdsh.sh HOSTFILE SCRIPT ARGUMENTS..." 2 "$@"

exec tempo-megatron launch deepspeed --hostfile "$1" "${@:2}"
