#!/usr/bin/env bash
# From nothing to a comparison: installs, prepares real text, trains a small GPT-2 stock and with Tempo, compares.
set -euo pipefail
invoked_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'END'
bash launch/quickstart.sh [OPTIONS]

Makes a virtual environment with all that is needed, prepares the sources of this machine's Python as text, trains a
small GPT-2 through the deepspeed launcher, first stock and then with Tempo from the same seed, and ends with one table
and loss.png. Without a GPU: 2 processes, tensor parallel 2. With 1 GPU: tensor parallel 1; with more: 2.

  --iters N              training steps of each run (default 60)
  --output DIR           metrics, logs, table and figure (default runs/quickstart)
  --venv DIR             the virtual environment (default .venv; the same as the variable VENV)
  --python PATH          the Python to make it with (default python3; the same as the variable PYTHON)
  --torch-index-url URL  take torch from this package index (the same as the variable TORCH_INDEX_URL)
END
}

iters=60
output=runs/quickstart
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h)
        usage
        exit 0
        ;;
    --iters | --output | --venv | --python | --torch-index-url)
        if [ $# -lt 2 ] || [ -z "$2" ]; then
            echo "$1 needs a value; see bash launch/quickstart.sh --help" >&2
            exit 2
        fi
        case $1 in
        --iters) iters=$2 ;;
        --output) output=$2 ;;
        --venv) VENV=$2 ;;
        --python) PYTHON=$2 ;;
        --torch-index-url) TORCH_INDEX_URL=$2 ;;
        esac
        shift 2
        ;;
    *)
        echo "$1 is not an option; see bash launch/quickstart.sh --help" >&2
        exit 2
        ;;
    esac
done
if ! [[ $iters =~ ^[1-9][0-9]*$ ]]; then
    echo "--iters is $iters; expected a whole number of at least 1" >&2
    exit 2
fi
# A folder is meant as seen from where the command was typed.
[ "$output" = runs/quickstart ] || case $output in /*) ;; *) output=$invoked_from/$output ;; esac
case ${VENV:-/} in /*) ;; *) VENV=$invoked_from/$VENV ;; esac

. launch/environment.sh
prepare_environment train
mkdir -p "$output"

echo
echo "== data: the Python standard library's sources and texts"
data=data/stdlib
mkdir -p data
python launch/prepare_data.py --input-stdlib --max-bytes 6M --vocab-size 4096 --output-prefix $data --skip-existing

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" = 0 ] && [ "${CUDA_VISIBLE_DEVICES-unset}" != "" ] && [ "$(num_gpus)" -gt 0 ]; then
    echo "Note: nvidia-smi shows a GPU that torch does not see, so this runs on the CPU; if torch is a CPU build," \
        "remove $VENV and start again."
fi
case $gpus in
0) processes=2 tp=2 config=configs/deepspeed/zero1_fp32.json dtype=fp32 unit=" (fp32: twice those of bf16)" ;;
1) processes=1 tp=1 config=configs/deepspeed/zero1_bf16.json dtype=bf16 unit= ;;
*) processes=2 tp=2 config=configs/deepspeed/zero1_bf16.json dtype=bf16 unit= ;;
esac
model=configs/model/gpt2_tiny.json
micro_batch_size=8
layout=(--sequence-parallel)
[ $tp = 2 ] || layout=()
if [ "$gpus" = 0 ]; then
    export DS_ACCELERATOR=cpu # DeepSpeed guesses it otherwise, with a warning
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((($(nproc) + 1) / 2))}" # the two processes share the cores
fi

# Weights start with deviation 1/sqrt(h): with the 0.02 of larger models the loss of this one has spikes early on.
train() {
    local name=$1 port
    shift
    port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    echo
    echo "== training: $name"
    deepspeed --log_level error --num_gpus $processes --master_port "$port" launch/pretrain_gpt.py \
        --deepspeed_config $config --model $model --data-path $data \
        --tensor-model-parallel-size $tp "${layout[@]}" \
        --micro-batch-size $micro_batch_size --global-batch-size $micro_batch_size --train-iters "$iters" \
        --lr 2e-3 --min-lr 2e-4 --lr-warmup-iters $((iters / 4)) --lr-decay-style cosine --adam-beta2 0.95 \
        --init-method-std 0.06 \
        --attention-dropout 0.1 --hidden-dropout 0.1 --seed 1234 --log-interval 5 --eval-iters 4 \
        --metrics-file "$output/$name/metrics.jsonl" "$@" ||
        die "The $name run failed, for the reason above."
}

train stock --no-use-tempo
train tempo --use-tempo

python -m tempo_megatron ledger --model $model --vocab-size 4096 --tp $tp "${layout[@]}" \
    --micro-batch-size $micro_batch_size --dtype $dtype --dropout 0.1 --stock cpu \
    --json "$output/ledger.json" >"$output/ledger.txt"

echo
echo "== stock and Tempo: gpt2_tiny, $dtype, tensor parallel $tp${layout:+ with sequence parallelism}, dropout 0.1"
python -m tempo_megatron.training.comparison --stock "$output/stock/metrics.jsonl" --tempo "$output/tempo/metrics.jsonl" \
    --ledger "$output/ledger.json" --table "$output/table.txt" --loss-plot "$output/loss.png"
echo
echo "sbh: bytes per token and hidden unit on each rank, s*s tensors included$unit"
echo "loss curves: $output/loss.png; what is kept, operation by operation: $output/ledger.txt"
echo "to go on with this environment: source ${VENV#"$invoked_from/"}/bin/activate"
