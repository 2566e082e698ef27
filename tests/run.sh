#!/usr/bin/env bash
# Installs what is missing, then runs the tests: bash tests/run.sh [--quick] [PYTEST ARGUMENTS...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    echo "bash tests/run.sh [--quick] [PYTEST ARGUMENTS...]"
    echo "  --quick  only the tests that need neither a GPU nor more than about 15 s each; must come first"
    echo "Variables VENV, PYTHON and TORCH_INDEX_URL: see launch/environment.sh."
    exit 0
fi
arguments=()
if [ "${1:-}" = --quick ]; then
    shift
    arguments=(-m "not slow and not gpu")
fi

. launch/environment.sh
prepare_environment test
exec python -m pytest "${arguments[@]}" "$@"
