# shellcheck shell=bash
# Sourced by quickstart.sh and tests/run.sh. `prepare_environment [EXTRA]` makes or reuses a virtual environment with
# this repository and what its extra needs (default: train; test has all of train too), and puts it first in PATH.
#
# Reads VENV             its folder (default: .venv in the repository)
#       PYTHON           the interpreter to make it with (default: the first of python3, python3.X that is >= 3.10)
#       TORCH_INDEX_URL  the package index to take torch from where none is at hand

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
TORCH="torch>=2.7"
TORCH_IS_NEW_ENOUGH='import torch; raise SystemExit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7))'

die() {
    printf '%s\n' "$*" >&2
    exit 1
}

num_gpus() {
    { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true
}

# The one command that installs Debian packages, as this user has to type it.
apt_command() {
    if [ "$(id -u)" = 0 ]; then
        echo "apt-get update && apt-get install -y $*"
    else
        echo "sudo apt-get update && sudo apt-get install -y $*"
    fi
}

find_python() {
    local candidate candidates=("${PYTHON:-python3}")
    [ -n "${PYTHON:-}" ] || candidates+=(python3.14 python3.13 python3.12 python3.11 python3.10)
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        die "PYTHON is $PYTHON, which is not a Python >= 3.10 that starts; give the path of one, or leave it out."
    fi
    die "Python >= 3.10 is needed and not found; install it with: $(apt_command python3 python3-venv)"
}

# A word that changes when what is to be installed, or where, or with which Python, changes.
environment_stamp() {
    "$VENV/bin/python" - "$VENV" "$ROOT" <<'PYTHON_END'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[2])
digest = hashlib.sha256(f"{sys.argv[1:]} {sys.version}".encode())
for name in ("setup.py", "pyproject.toml", "launch/environment.sh"):
    digest.update((root / name).read_bytes())
print(digest.hexdigest())
PYTHON_END
}

make_venv() {
    local python version
    if [ -f "$VENV/made-for" ] && [ "$(cat "$VENV/made-for")" != "$VENV" ]; then
        echo "$VENV was moved from $(cat "$VENV/made-for"), which breaks its scripts: making it anew."
        rm -rf "$VENV"
    fi
    if [ -d "$VENV" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    python=$(find_python) || exit 1
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        die "$python lacks the venv module; install it with: $(apt_command "python$version-venv")"
    fi
    echo "Making the virtual environment $VENV with $("$python" --version)."
    "$python" -m venv "$VENV" || die "$python -m venv $VENV failed, for the reason above."
    printf '%s\n' "$VENV" >"$VENV/made-for"
}

check_python_is_that_of_venv() {
    local identity='import sys; print(sys.base_prefix, sys.version)'
    if [ -n "${PYTHON:-}" ] && [ "$("$PYTHON" -c "$identity" 2>&1)" != "$("$VENV/bin/python" -c "$identity")" ]; then
        die "PYTHON is $PYTHON, but $VENV was made with another Python; remove that folder, or leave PYTHON out."
    fi
}

pip_install() {
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input "$@" >>"$LOG" 2>&1
}

# Without a GPU the registry's build of torch is the last resort: it brings gigabytes of CUDA packages.
install_torch() {
    local python gpus site
    gpus=$(num_gpus)
    if "$VENV/bin/python" -c "$TORCH_IS_NEW_ENOUGH" 2>/dev/null; then
        echo "torch: the one in $VENV${TORCH_INDEX_URL:+ (the index $TORCH_INDEX_URL is not asked)}"
        return
    fi
    python=$(find_python) || exit 1
    if "$python" -c "$TORCH_IS_NEW_ENOUGH" 2>/dev/null &&
        { [ "$gpus" = 0 ] || "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; }; then
        site=$("$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
        printf '%s\n' "$site" >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
        echo "torch: the one of $python, in $site"
    elif [ -n "${TORCH_INDEX_URL:-}" ]; then
        echo "torch: from $TORCH_INDEX_URL"
        pip_install --index-url "$TORCH_INDEX_URL" "$TORCH" ||
            die "No torch could be installed from $TORCH_INDEX_URL; pip's words are in $LOG"
    elif [ "$gpus" != 0 ]; then
        echo "torch: the registry's build with CUDA (several GB)"
        pip_install "$TORCH" || die "torch could not be installed; pip's words are in $LOG"
    elif pip_install --no-index --no-deps "$TORCH"; then
        echo "torch: a local wheel that pip is set up to find"
    else
        echo "torch: the registry's build, which may bring several GB of CUDA packages though there is no GPU here." \
            "To avoid that, stop now (Ctrl-C) and give --torch-index-url URL (or the variable TORCH_INDEX_URL) with" \
            "the URL of an index of CPU builds, or install a CPU build of torch for $python first."
        pip_install "$TORCH" || die "torch could not be installed; pip's words are in $LOG"
    fi
}

write_torchrun() {
    printf '#!/bin/sh\nexec "%s/bin/python" -m torch.distributed.run "$@"\n' "$VENV" >"$VENV/bin/torchrun"
    chmod +x "$VENV/bin/torchrun"
}

install_repository() {
    local version
    version=$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
    echo "torch==$version" >"$VENV/constraints.txt"
    echo "Installing tempo-megatron[$1] beside torch $version (log: $LOG)."
    pip_install -c "$VENV/constraints.txt" -e "${ROOT}[$1]" ||
        die "The installation of tempo-megatron failed; pip's words are in $LOG"
    # A torch or DeepSpeed that is the user's has its launcher elsewhere, bound to that Python.
    [ -x "$VENV/bin/deepspeed" ] || pip_install --no-deps --ignore-installed deepspeed ||
        die "The installation of deepspeed failed; pip's words are in $LOG"
    [ -x "$VENV/bin/torchrun" ] || write_torchrun
    "$VENV/bin/python" -c 'import torch, megatron.core' >>"$LOG" 2>&1 ||
        die "Something was installed that cannot be imported; the traceback is in $LOG"
}

note_missing_compiler() {
    local include version
    include=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    version=$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if ! echo '#include <Python.h>' | "${CXX:-g++}" -I"$include" -fsyntax-only -x c++ - 2>/dev/null; then
        echo "Note: ${CXX:-g++} compiles nothing with Python's headers here. Training runs without, slower on a CPU;" \
            "DeepSpeed's optimizer offload and torch.compile would need it: $(apt_command g++ "python$version-dev")"
    fi
}

prepare_environment() {
    local extra=${1:-train} stamp started=$SECONDS
    VENV=${VENV:-$ROOT/.venv}
    mkdir -p "$(dirname "$VENV")"
    VENV=$(cd "$(dirname "$VENV")" && pwd -P)/$(basename "$VENV")
    LOG=$VENV/install.log
    make_venv
    check_python_is_that_of_venv
    stamp=$(environment_stamp) || die "$VENV/bin/python does not start; remove $VENV and start again."
    if [ "$(cat "$VENV/installed-$extra" 2>/dev/null)" != "$stamp" ]; then
        install_torch
        install_repository "$extra"
        printf '%s\n' "$stamp" >"$VENV/installed-train"
        printf '%s\n' "$stamp" >"$VENV/installed-$extra"
        echo "The environment is ready after $((SECONDS - started)) s."
    elif [ -n "${TORCH_INDEX_URL:-}" ]; then
        echo "$VENV is complete, so $TORCH_INDEX_URL is not asked for torch."
    fi
    note_missing_compiler
    export VIRTUAL_ENV=$VENV PATH=$VENV/bin:$PATH
    unset PYTHONHOME
}
