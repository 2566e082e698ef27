# shellcheck shell=bash disable=SC2034
# Sourced: the arguments of GPT-3 22B on 4 hosts of 8 GPUs of 80 GiB (docs/multinode.md says what they keep).
JOB=(
    --deepspeed_config configs/deepspeed/zero1_bf16.json --model configs/model/gpt3_22b.json --use-tempo
    --tensor-model-parallel-size 8 --sequence-parallel
    --micro-batch-size 4 --global-batch-size 512 --train-iters 100000
    --lr 1e-4 --min-lr 1e-5 --lr-warmup-iters 2000 --lr-decay-style cosine
    --log-interval 10 --save-interval 250 --keep-checkpoints 3
)
