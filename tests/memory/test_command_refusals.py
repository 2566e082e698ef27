"""What `ledger`, `estimate`, `plan`, `bench` and `flops` refuse: one sentence that names what was typed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tempo_megatron.cli import main
from tempo_megatron.memory.commands.estimate import describe_run
from tempo_megatron.memory.plan.gpu import list_configs
from tempo_megatron.memory.run import MegatronFsdp, OptimizerSettings, Run
from tempo_megatron.models.shape import make_shape
from tempo_megatron.models.shape_file import read_shape_file
from tempo_megatron.settings.config import TempoConfig

TINY, GPT2 = "--model configs/model/gpt2_tiny.json", "--model configs/model/gpt2_124m.json"
MIXTRAL = "--model configs/model/mixtral_8x7b.json"
PLAN = "--model configs/model/gpt2_345m.json --gpu a100 --gpu-memory 16GB --fixed-memory 6GB --micro-batch-size 8"
WORDS = (
    "-- pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 16"
)
BESIDE = f"--world-size 2 --vocab-size 5 {WORDS}"
ZERO2 = "--deepspeed_config configs/deepspeed/zero2_bf16.json"


def refuse(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(shlex.split(words)) == 2
    except SystemExit as end:  # the parser's, which first says how the command is used
        assert end.code == 2 and message.startswith("argument --")
    printed, error = capsys.readouterr()
    assert not printed
    assert message in error and (message.startswith("argument --") or error.count("\n") == 1)


# Words -> of the sentence.
REFUSED = f"""
ledger --model nowhere.json => cannot be read
ledger {GPT2} --tp 5 => --num-attention-heads 12 is not a multiple of --tp 5; change one of them
ledger {GPT2} --sequence-parallel => --sequence-parallel needs --tp of at least 2
ledger {GPT2} --recompute full mlp => --recompute full already recomputes everything; give it alone
ledger {GPT2} --no-use-tempo => --no-use-tempo is given
ledger {GPT2} --recompute moe_act => --recompute-modules is moe_act, and the estimate knows core_attn, mlp
ledger {MIXTRAL} --timeline build/step.png => --timeline build/step.png is given, and the model has experts
ledger {MIXTRAL} --html build/step.png => --html build/step.png is given, and the model has experts
ledger {MIXTRAL} --trace build/step.png => --trace build/step.png is given, and the model has experts
ledger {MIXTRAL} --snapshot build/step.png => --snapshot build/step.png is given, and the model has experts
ledger {TINY} --tempo-layers '{{"3-4": {{"norm": "off"}}}}' => tempo.layers["3-4"] goes beyond the decoder's 4 layers
flops {GPT2} --gpu h100 --step-seconds 1e-9 => --step-seconds is 1e-09, and 1 x NVIDIA H100
flops {GPT2} --tp 8 --step-seconds 3 => give both or neither
order {MIXTRAL} => has experts, whose tokens differ from step to step
estimate {GPT2} --gpu b300 => the nearest known one is b200
estimate {GPT2} --ep 2 => --ep 2 is given, and the model has no experts; leave it out
estimate {MIXTRAL} --ep 3 --dp 3 => --ep 3 does not divide the model's 8 experts
estimate {MIXTRAL} --ep 2 => does not divide the 1 ranks of a pipeline stage; change --ep, --tp or --dp
estimate {MIXTRAL} --ep 4 --dp 4 --moe-imbalance 4.1 => at most 4, which the fullest of 4 ranks gets
estimate {GPT2} --pp 7 => 12 layers are not a multiple of --pp 7; change one of them
estimate {GPT2} --use-tempo --tempo-linear-qkv recompute --tempo-attention off => may keep copies of q, k and v, so that
estimate {TINY} --use-tempo --tempo-layers '{{"3": {{"attention": "off", "linear_qkv": "recompute"}}}}' => keep copies
plan --gpu-memory 9GB {BESIDE} --use-tempo --tempo-linear-qkv recompute --tempo-attention off => copies of q, k and v
estimate {GPT2} --zero 1 --optimizer megatron => ZeRO is DeepSpeed's: leave one out
estimate {GPT2} --decoder-first-pipeline-num-layers 2 => needs at least 2 stages, and there is 1
estimate {GPT2} --pp 3 --decoder-last-pipeline-num-layers 3 => leaves 9 of 12 layers for 2 other stages
estimate {GPT2} --pp 2 --num-layers-per-virtual-pipeline-stage 4 => expected a divisor of the 6 layers
estimate {GPT2} --allocator --stock cpu => the allocator of a GPU; expected --stock local or transformer_engine
estimate {GPT2} --tempo-norm off => Tempo is off
estimate {GPT2} --stock local --stock-attention unfused => is Transformer Engine's, and the stock modules are local
estimate {GPT2} --no-masked-softmax-fusion => stock attention (transformer_engine) has no softmax kernel to leave out;
estimate {GPT2} --no-masked-softmax-fusion --stock cpu => stock attention (cpu) has no softmax kernel to leave out;
estimate {TINY} --zero 1 {ZERO2} => --zero is 1, but "zero_optimization.stage" in the DeepSpeed JSON is 2
estimate {TINY} --optimizer megatron {ZERO2} => given with --optimizer megatron; that file's optimizer is DeepSpeed's
estimate --model configs/model/t5_base.json --pp 2 => --pp is 2, and the model is a T5
plan {MIXTRAL} --gpu-memory 80GiB --moe-imbalance 0.5 => --moe-imbalance is 0.5; expected at least 1
plan {PLAN} --recompute-allowed --gpu-memory 6.1GB => 5.51 GiB a GPU may be filled, and the least that fits is
plan {PLAN} --pp 7 => 24 layers are not a multiple of --pp 7; change one of them
plan {PLAN} --tp 3 => --num-attention-heads 16 is not a multiple of --tp 3
plan {PLAN} --gpu h1000 => --gpu h1000 is unknown; the nearest known one is h100
plan {PLAN} --pp 8 --fixed-memory 6GB 5GB 4GB => has 3 sizes; expected one, or one for each of 8 stages
plan {PLAN} --model configs/model/t5_base.json => the planner does not support T5; give a GPT or a BERT
plan {PLAN} --dp 2 --micro-batch-size 4 --global-batch-size 12 => is not a multiple of --dp 2 times a micro batch of 4
plan {PLAN} --num-micro-batches 4 --global-batch-size 12 => --global-batch-size and --num-micro-batches are both given
plan {PLAN} --margin 100 => argument --margin: 100 is not a percentage from 0 to under 100
plan {PLAN} --allocator => --allocator does not go with --fixed-memory
plan {PLAN} --ep 8 => --ep 8 is given, and the model has no experts
plan {PLAN} --cp 3 => not a multiple of twice --cp 3
plan {PLAN} --gpus-per-node 4 => --gpus-per-node 4 is given without --host-memory
plan {PLAN} --host-memory 0 => argument --host-memory
ledger {GPT2} --dropout 1 => argument --dropout: 1 is not in [0, 1)
estimate --model a.json {BESIDE} => --model is given beside a command of Megatron-LM
estimate --tp 2 {BESIDE} => --tp is given beside a command
estimate --hf a {BESIDE} => --hf is given beside a command
estimate --vocab-size 5 {WORDS} => give --world-size
estimate --world-size 3 {WORDS} --pipeline-model-parallel-size 2 => 3 GPUs are not a multiple
estimate --moe-imbalance 1.2 {BESIDE} => the run has no experts
plan --gpu-memory 1GiB {BESIDE} --hybrid-layer-pattern M*-M --mamba-num-heads 8 => the command gives hybrid, which
plan --gpu-memory 1GiB {BESIDE} --use-distributed-optimizer --use-megatron-fsdp => the command gives Megatron-FSDP
plan --gpu-memory 1GiB {BESIDE} --optimizer muon => the command gives Muon, states whole, which the planner does not
bench --calibrate --output nowhere/mine.json => lies in a folder that does not exist
bench --calibrate --output mine.json --device cuda => torch sees no CUDA device
bench --kept-bytes --output mine.json --round-ms 5 => --round-ms 5 is of --calibrate
bench --kept-bytes --output mine.json => it is not installed; install it
""".strip()


@pytest.mark.parametrize("line", REFUSED.splitlines())
def test_what_cannot_be_is_one_sentence(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuse(*line.split(" => "), capsys)


# The DeepSpeed JSON, words -> of the sentence.
CONTRADICTIONS = """
{} --dtype bf16 => --dtype is bf16, but the DeepSpeed JSON trains in fp32, as it enables neither bf16
{"bf16": {"enabled": true}} --dtype fp32 => --dtype is fp32, but the DeepSpeed JSON trains in bf16, as it enables bf16;
{"bf16": {"enabled": true}, "fp16": {"enabled": true}} => the DeepSpeed JSON enables bf16 and fp16
{"bf16": {"enabled": 2}} => "bf16.enabled" is 2; expected true or false
{"bf16": true} => "bf16" is True; expected an object {...}
{"gradient_clipping": -1} => "gradient_clipping" is -1; expected a number of at least 0 or "auto"
{"zero_optimization": {"stge": 1}} => the nearest known name is "zero_optimization.stage"
{"train_micro_batch_size_per_gpu": 2} --micro-batch-size 4 => --micro-batch-size is 4, but \
"train_micro_batch_size_per_gpu" in the DeepSpeed JSON is 2; leave --micro-
{"gradient_accumulation_steps": 2} --num-micro-batches 4 => --num-micro-batches is 4, but \
"gradient_accumulation_steps" in the DeepSpeed JSON is 2; leave --num
{"train_batch_size": 6, "gradient_accumulation_steps": 2} --micro-batch-size 2 => the DeepSpeed JSON's \
"train_batch_size" 6 is not 2 times --dp 1 times a micro batch of 2; change
{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}} => the DeepSpeed JSON has "offload_param", \
which needs ZeRO 3, and its stage is 2
""".strip()


@pytest.mark.parametrize("command", ["estimate", "plan --gpu-memory 80GiB --gpu h100"])
@pytest.mark.parametrize("line", CONTRADICTIONS.splitlines())
def test_what_contradicts_the_deepspeed_json_is_one_sentence(
    command: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, end = json.JSONDecoder().raw_decode(line)
    words, message = line[end:].split(" => ")
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(config))
    refuse(f"{command} {TINY} --deepspeed_config {file} {words}", message, capsys)


@pytest.mark.parametrize(
    "command",
    [
        *(f"{name} --model no.json" for name in ("ledger", "estimate", "plan --gpu-memory 1GiB", "order", "flops")),
        f"ledger {TINY} --deepspeed_config no.json",
        "estimate --script no.json -- a",
        "plan --gpu-memory 1GiB --megatron-yaml no.json",
        f"flops {TINY} --step-seconds 1 --gpu no.json",
    ],
)
def test_a_wrong_path_is_said_before_anything_is_imported(command: str) -> None:
    given = [sys.executable, "-X", "importtime", "-m", "tempo_megatron", *command.split()]
    ran = subprocess.run(given, capture_output=True, text=True)
    assert ran.returncode == 2 and re.search("no.json (cannot be read|is unknown)", ran.stderr)
    assert " torch\n" not in ran.stderr


def test_every_command_knows_the_same_gpus_and_a_title_names_each_part_of_a_layout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for gpu in list_configs("gpu"):
        assert main(["estimate", *TINY.split(), "--gpu", gpu, "--no-use-tempo"]) == 0, capsys.readouterr().err
    capsys.readouterr()
    words = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    words += "--micro-batch-size 1 --global-batch-size 4 --bf16 --num-experts 4 --moe-grouped-gemm "
    words += "--expert-model-parallel-size 2 "
    words += "--moe-token-dispatcher-type alltoall --tensor-model-parallel-size 2 --sequence-parallel "
    words += "--expert-tensor-parallel-size 1 --context-parallel-size 2 --pipeline-model-parallel-size 2 "
    words += "--num-layers-per-virtual-pipeline-stage 1 --tokenizer-type NullTokenizer --vocab-size 512 "
    words += "--use-distributed-optimizer --fp8-format hybrid --fp8-recipe tensorwise"
    assert main(["estimate", "--world-size", "8", "--", "pretrain_gpt.py", *words.split()]) == 0
    title = capsys.readouterr().out
    for part in ("fp8 tensorwise", "TP 2 + SP", "CP 2", "EP 2", "ETP 1", "PP 2 in 2 chunks", "DP 1: 8 ranks"):
        assert part in title, part


TITLES = {
    OptimizerSettings(kind="none"): "no optimizer",
    OptimizerSettings(kind="deepspeed", zero_stage=2): "DeepSpeed ZeRO 2,",
    OptimizerSettings(kind="deepspeed", zero_stage=3, offloads=True): "DeepSpeed ZeRO 3 with states on the host",
    OptimizerSettings(distributed=False): "Megatron's optimizer",
    OptimizerSettings(instances=2): "Megatron's distributed optimizer in 2 instances",
    OptimizerSettings(distributed=False, muon="dealt"): "Megatron's Muon, states dealt",
    OptimizerSettings(fsdp=MegatronFsdp(main_bytes=4)): "Megatron-FSDP",
}


def test_a_title_names_optimizer_recomputation_and_offload() -> None:
    shape = make_shape(**read_shape_file("configs/model/gpt2_tiny.json"), vocab_size=512)
    of_run = {"tempo": TempoConfig(offload="all"), "recompute": ("full",), "recompute_num_layers": 1}
    for optimizer, expected in TITLES.items():
        title = describe_run(Run(model=shape, optimizer=optimizer, **of_run))
        assert expected in title and title.endswith(", recompute full of 1 layers a chunk, offload=all")
