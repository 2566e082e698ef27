#!/usr/bin/env bash
# Installs what is missing, then runs the tests: bash tests/run.sh [--quick | --exhaustive] [PYTEST ARGUMENTS...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    echo "bash tests/run.sh [--quick | --exhaustive] [PYTEST ARGUMENTS...]"
    echo "  --quick       one case of each test that needs neither a GPU nor seconds: two minutes on two cores"
    echo "  --exhaustive  also more cases of what others test: much longer"
    echo "As many processes as there are cores share the tests, 8 at most; -n NUMBER says otherwise, -n 0 takes this one."
    echo "Where there is a GPU, one process has it for itself."
    echo "Variables VENV, PYTHON and TORCH_INDEX_URL: see launch/environment.sh."
    exit 0
fi
arguments=(--dist worksteal --durations=10 --durations-min=10)

. launch/environment.sh
prepare_environment test
if [ "$(num_gpus)" = 0 ]; then
    arguments+=(-n "$(python -c 'import os; print(min(8, len(os.sched_getaffinity(0))))')")
fi
# What DeepSpeed compiles stays with this checkout: beside a lock of a run that was killed, a test waits for ever.
export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$PWD/.torch_extensions}
exec python -m pytest "${arguments[@]}" "$@"
