#!/usr/bin/env bash
# Stock beside Tempo in an unmodified Megatron-LM checkout: bash benchmarks/megatron_lm.sh MEGATRON_LM_ROOT [OPTIONS]
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/megatron_lm.py" "$@"
