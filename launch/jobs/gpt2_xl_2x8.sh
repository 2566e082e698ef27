# shellcheck shell=bash disable=SC2034
# Sourced: the arguments of GPT-2 XL on 2 hosts of 8 GPUs of 80 GiB (docs/multinode.md says what they keep).
JOB=(
    --deepspeed_config configs/deepspeed/zero1_bf16.json --model configs/model/gpt2_xl_1558m.json --use-tempo
    --micro-batch-size 8 --global-batch-size 512 --train-iters 100000
    --lr 2e-4 --min-lr 2e-5 --lr-warmup-iters 2000 --lr-decay-style cosine
    --log-interval 10 --save-interval 500 --keep-checkpoints 3
)
