"""What a command of Megatron-LM becomes: a Run, or one sentence."""

from __future__ import annotations

import json
import operator
import random
import shlex
import types
from pathlib import Path

import pytest
import torch

from tempo_megatron.cli import main
from tempo_megatron.memory.megatron.command import find_in_script, spell_arguments, split_command
from tempo_megatron.memory.megatron.options import KNOWN_IN_COMMANDS, READ, list_options
from tempo_megatron.memory.megatron.read_command import read_command
from tempo_megatron.memory.megatron.read_run import find_unknown
from tempo_megatron.memory.run import Hybrid, MegatronFsdp, OptimizerSettings, Run

GPT = (
    "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 4 --global-batch-size 32 --bf16"
)

FSDP = "--use-distributed-optimizer --use-megatron-fsdp"
LAYOUT = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"
SPLIT = "--num-experts 8 --tensor-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"


def read(text: str, script: str = "pretrain_gpt.py", world_size: int | None = 8) -> Run:
    """The run of a command whose tokenizer is known."""
    words = split_command([*script.split(), *shlex.split(text)])
    return read_command(words, world_size=world_size, vocab_size=50257)[0]


# Words -> fields of the run; those of published runs are in test_estimate_published.py.
TAKEN = f"""
=> layout.dp=8; num_micro_batches=1; dtype=torch.bfloat16; stock='transformer_engine'
--tensor-model-parallel-size=2 => layout.tp=2; layout.dp=4; padded_vocab_size=50432
--context-parallel-size 2 => layout.cp=2; layout.dp=4; num_micro_batches=2
--micro-batch-size 2 --micro-batch-size 1 => micro_batch_size=1; num_micro_batches=4
--sequence-parallel => layout.sp=False
--recompute-granularity full --recompute-method block --recompute-num-layers 3 => recompute_num_layers=3
{LAYOUT} E,t*12||,|L => layout.chunks=(12, 0, 0, 0)
{LAYOUT} Et*12|mL --mtp-num-layers 1 => layout.chunks=(12, 0); mtp_num_layers=1
--hybrid-override-pattern M*-M/*- --mtp-num-layers 1 => hybrid=Hybrid(pattern='M*-M', mtp_pattern='*-'); \
layout.chunks=None; model.num_experts=None
--recompute-activations => recompute=('core_attn',)
--recompute-granularity selective --recompute-modules layernorm mlp => recompute=('mlp',)
--use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype fp8 \
--exp-avg-sq-dtype fp16 => optimizer=OptimizerSettings(gradient_bytes=2, state_bytes=(2, 1, 2))
--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 2 => \
float8='tensorwise'; float8_layers=(False, *[True] * 9, False, False)
--first-last-layers-bf16 => float8=None; float8_layers=None
--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 5000 => \
optimizer=OptimizerSettings(overlaps_reduction=True, bucket_elements=5000)
--use-distributed-optimizer --use-megatron-fsdp --suggested-communication-unit-size 5000 => \
optimizer=OptimizerSettings(fsdp=MegatronFsdp(main_bytes=4, unit_elements=5000))
--use-distributed-optimizer --use-megatron-fsdp --megatron-fsdp-main-params-dtype auto \
--megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype bf16 => \
optimizer=OptimizerSettings(fsdp=MegatronFsdp(main_bytes=None, gradient_bytes=4, communicated_bytes=2))
--optimizer dist_muon => optimizer=OptimizerSettings(distributed=False, muon='laid out')
--num-experts 0 --lr -1 --data-path 0.5 a 0.5 b --rl-profile-dir x => layout.world_size=8
--global-batch-size 64 --rampup-batch-size 16 16 5859375 => num_micro_batches=2
{SPLIT} => layout.ep=4; layout.etp=1; layout.dispatcher='allgather'; layout.overlaps=False
--num-experts 8 --tensor-model-parallel-size 2 => model.expert_size=2048; layout.etp=2; moe_imbalance=None; \
model.layers_with_experts=(True,) * 12
--quick-geglu --glu-linear-offset 1.0 --softmax-type learnable --window-attn-skip-freq 2 --window-size 127,0 \
--activation-func-clamp-value 7.0 --no-bias-gelu-fusion --no-bias-dropout-fusion => model.activation='quick_geglu'; \
model.softmax_type='learnable'; model.window_attn_skip_freq=2; model.activation_func_clamp_value=7.0; \
fuses_activation=False
--swiglu => fuses_activation=True
--swiglu --no-bias-swiglu-fusion => fuses_activation=False
"""
# What stands before the script -> likewise.
STARTED = """
CUBLAS_WORKSPACE_CONFIG=:4096:8 => cublas_workspace_bytes=32 << 20; expandable_segments=False
CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8 => cublas_workspace_bytes=(8 << 20) + (128 << 10)
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True => expandable_segments=True
PYTORCH_ALLOC_CONF=max_split_size_mb:64,expandable_segments:true => expandable_segments=True
PYTORCH_ALLOC_CONF=expandable_segments:False PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True => \
expandable_segments=False
torchrun --nproc-per-node 4 => layout.world_size=4
CUDA_DEVICE_MAX_CONNECTIONS=1 python -m torch.distributed.run --nproc_per_node=8 --nnodes 2 => layout.world_size=16
deepspeed --num_gpus 8 --num_nodes 2 => layout.world_size=16
"""


def list_lines(table: str) -> list[str]:
    """A line that ends in a backslash goes on in the next one."""
    return table.replace("\\\n", "").strip("\n").splitlines()


def check_fields(run: Run, expected: str) -> None:
    known = {each.__name__: each for each in (torch, Hybrid, MegatronFsdp, OptimizerSettings)}
    for name, value in (each.split("=", 1) for each in expected.split("; ")):
        assert operator.attrgetter(name)(run) == eval(value, known), name


@pytest.mark.parametrize("line", list_lines(TAKEN))
def test_words_become_fields_of_a_run(line: str) -> None:
    words, expected = line.split("=> ")
    check_fields(read(f"{GPT} {words}"), expected)


@pytest.mark.parametrize("line", list_lines(STARTED))
def test_what_stands_before_the_script_is_read(line: str) -> None:
    launcher, expected = line.split(" => ")
    world_size = None if "world_size" in expected else 8
    run = read(f"{GPT} --global-batch-size 64", f"{launcher} examples/pretrain_gpt.py", world_size=world_size)
    check_fields(run, expected)
    with pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG is 4096:8; expected"):
        read(GPT, "CUBLAS_WORKSPACE_CONFIG=4096:8 pretrain_gpt.py")


# Words -> of the sentence.
REFUSED = f"""
--num-experts 8 --moe-shared-expert-overlap => --moe-shared-expert-overlap runs shared experts beside
--num-experts 8 --moe-latent-size 64 => --moe-latent-size gives experts other tokens
--num-experts 8 --moe-paged-stash => keeps the experts' tokens elsewhere
--num-experts 8 --moe-pad-expert-input-to-capacity => give both or none
--num-experts 8 --moe-expert-capacity-factor 1.0 --moe-router-load-balancing-type sinkhorn => which drops no
--num-experts 8 --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 4.1 \
--moe-pad-expert-input-to-capacity => fails above 4, where an expert has more rows than there are tokens
--num-experts 8 --expert-model-parallel-size 3 => --expert-model-parallel-size 3 does not divide the model's 8 experts
--num-experts 8 --expert-model-parallel-size 8 --expert-tensor-parallel-size 2 => does not divide the 8 ranks
--num-experts 8 --moe-layer-freq [1]*3 => names 3 layers, and there are 12
--num-experts 8 --moe-layer-freq x => expected a number, or lists such as ([0]*1+[1]*15)
--num-experts 8 --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm => -dispatcher-type alltoall or flex
--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --recompute-method uniform \
--overlap-moe-expert-parallel-comm --recompute-granularity full --recompute-num-layers 1 => are both given
--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3 --global-batch-size 16 \
--micro-batch-size 4 => 1 micro batches pass through chunks in groups of 2
--fine-grained-activation-offloading => activations on the host (tempo.offload is known)
--mtp-standalone => --mtp-standalone gives the run multi-token prediction in a stage of its own
{LAYOUT} Et*12|L --num-virtual-stages-per-pipeline-rank 1 => are both given
{LAYOUT} Et*11|L => is not E, 12 times t and L
{LAYOUT} Et*12L => has 1 chunks, which are not a multiple of --pipeline-model-parallel-size 2
{LAYOUT} Et*12|m|m|L --mtp-num-layers 2 => has m in chunk 1 and 2 of 0 to 3; expected all of them in the
--recompute-granularity selective --recompute-modules layernorm --transformer-impl local => knows core_attn, mlp only
--multi-latent-attention --transformer-impl local => needs --transformer-impl transformer_engine
--multi-latent-attention --group-query-attention => is given with --multi-latent-attention
--multi-latent-attention --v-head-dim 0 => --v-head-dim is 0; expected a positive number
--is-hybrid-model => give --hybrid-layer-pattern with a letter for each: M, *, - or E
--hybrid-mlp-ratio 0.3 => of former versions of Megatron-LM; give --hybrid-layer-pattern
--hybrid-layer-pattern M*- --transformer-impl local => with --transformer-impl transformer_engine and without
--hybrid-layer-pattern MG => has G, which the estimate does not know
--hybrid-layer-pattern M*-/MM => prediction of MM, and the estimate knows *- and *E there
--hybrid-layer-pattern M*-/*-/*E => has *- and *E for multi-token prediction; give one pattern
--hybrid-layer-pattern M*- --mtp-num-layers 1 => needs a pattern for its layers
--hybrid-layer-pattern M|*|- --pipeline-model-parallel-size 2 => 3 chunks; expected a multiple
--hybrid-layer-pattern ME => has E, and there are no experts; give --num-experts
--hybrid-layer-pattern M- --num-virtual-stages-per-pipeline-rank 2 => and --hybrid-layer-pattern are both given
--hybrid-layer-pattern M- --mamba-num-heads 12 => do not divide over each other
--hybrid-layer-pattern M- --disable-mamba-mem-eff-path => a scan that keeps what it could compute again
--context-parallel-size 3 => 8 GPUs are not a multiple of --tensor-model-parallel-size 1 times
--tensor-model-parallel-size 3 => 8 GPUs are not a multiple
--tensor-model-parallel-size 0 => --tensor-model-parallel-size is 0; expected a positive number
--tensor-model-parallel-size 8 --num-attention-heads 4 --kv-channels 64 => 4 is not a multiple of --tensor-model
--use-distributed-optimizer --num-distributed-optimizer-instances 3 => does not divide the 8 ranks
--num-distributed-optimizer-instances 2 => --num-distributed-optimizer-instances 2 needs --use-distributed-optimizer
--exp-avg-dtype bf16 => --exp-avg-dtype bf16 needs --use-precision-aware-optimizer
--overlap-param-gather => needs --use-distributed-optimizer and --overlap-grad-reduce
--fp8-param-gather --use-distributed-optimizer => needs --fp8-format; add it, or leave the other out
--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear => give native or te
--bf16 false => 'false' belongs to no option
--hidden 5 => nearest is --hidden-size
--hiden-size 5 => nearest is --hidden-size
--hidden-size=-- => --hidden-size has no value; give one
--batch-size 4 => give --micro-batch-size
--fp16 => --bf16 and --fp16 are both given
--global-batch-size 33 => is not a multiple of --micro-batch-size 4
--num-attention-heads 7 => not a multiple
--num-layers => expected one argument
--swiglu=1 => ignored explicit argument
--pipeline-model-parallel-size 8 => 12 layers are not a multiple of --pipeline-model-parallel-size 8
--encoder-num-layers 12 => --num-layers and --encoder-num-layers are both given
--recompute-granularity full => needs --recompute-method
--defer-embedding-wgrad-compute => needs --pipeline-model-parallel-size of at least 2
--pipeline-model-parallel-size 2 --defer-embedding-wgrad-compute --wgrad-deferral-limit -1 => expected 0 or more
--optimizer muon --use-precision-aware-optimizer --use-distributed-optimizer => is for --optimizer adam
--use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16 \
--accumulate-allreduce-grads-in-fp32 => are both given
--optimizer lion => another optimizer than Adam
--optimizer muon --num-distributed-optimizer-instances 2 --use-distributed-optimizer => not for --optimizer
--optimizer muon --muon-scalar-optimizer lion => give adam
--optimizer dist_muon --overlap-grad-reduce => knows one bucket
--fp8-format hybrid --fp8-recipe custom => --fp8-recipe custom gives the run scales
--fp8-format hybrid --fp8-recipe delayed --first-last-layers-bf16 => is not for --fp8-recipe delayed
--fp8-format hybrid --fp8-recipe mxfp8 --first-last-layers-bf16 --num-layers-at-start-in-bf16 13 => from 0 to the 12
--fp8-format hybrid --fp8-recipe mxfp8 --fp8-param-gather --use-distributed-optimizer => weights of --fp8-recipe mxfp8
--fp8-format hybrid --transformer-impl local => or change --transformer-impl or --gpu
{FSDP} --optimizer muon => known to the estimate with Adam and without
{FSDP} --data-parallel-sharding-strategy optim => with --data-parallel-sharding-strategy optim_grads_params
{FSDP} --pipeline-model-parallel-size 2 => in one pipeline stage
{FSDP} --fp8-format hybrid --fp8-recipe blockwise --fp8-param-gather => weights of --fp8-recipe blockwise
{FSDP} --fsdp-double-buffer => buffers of Megatron-FSDP that stay
--use-torch-fsdp2 => sharded by torch's FSDP (--use-megatron-fsdp is known)
--tp-comm-overlap --tensor-model-parallel-size 2 => --tp-comm-overlap needs
--step-batch-size-schedule '0:32 1B:64' => --global-batch-size and --step-batch-size-schedule are both given
"""


@pytest.mark.parametrize("line", list_lines(REFUSED))
def test_what_cannot_be_is_one_sentence(line: str) -> None:
    words, sentence = line.split(" => ")
    with pytest.raises(ValueError) as caught:
        read(f"{GPT} {words}")
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("field", KNOWN_IN_COMMANDS)
def test_a_built_run_is_not_planned_with_what_only_the_estimate_knows(field: str) -> None:
    config = types.SimpleNamespace(context_parallel_size=1, **{field: 1})
    run = types.SimpleNamespace(optimizer="adam")
    assert find_unknown("GPTModel", config, run) == list_options(field).popitem()[1].gives


def test_an_option_that_nobody_knows_is_a_warning() -> None:
    command = split_command(["pretrain_gpt.py", *GPT.split(), "--of-our-fork", "3", "--other"])
    _, warnings = read_command(command, world_size=8, vocab_size=50257)
    assert [warning.split()[0] for warning in warnings] == ["--of-our-fork", "--other"]


def test_arguments_of_a_test_case_are_spelled_as_its_script_does() -> None:
    arguments = {"--bf16": True, "--swiglu": False, "--recompute-modules": "[mlp moe_act]", "--lr": 1e-4, "--a": [1, 2]}
    assert spell_arguments(arguments) == [
        *["--bf16", "--swiglu", "false", "--recompute-modules", "mlp", "moe_act", "--lr", "0.0001", "--a", "1", "2"]
    ]
    # As deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release writes a layout: read by xargs, then by eval.
    layout = {"--layout": r"Et*2\\|\\(tt\\|\\)*5t\\|tmL", "--split": "949,50,1", "--sizes": "2 2", "--moe": "([1]*3)"}
    assert spell_arguments(layout) == [
        *["--layout", "Et*2|(tt|)*5t|tmL", "--split", "949,50,1", "--sizes", "2", "2", "--moe", "([1]*3)"]
    ]
    with pytest.raises(ValueError, match="--save of the test case is 'a, whose last quote does not end; correct it"):
        spell_arguments({"--save": "'a"})


def test_a_test_case_of_images_names_its_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "multimodal-llava" / "case" / "model_config.yaml"
    file.parent.mkdir(parents=True)
    sizes = "  --num-layers: 1\n  --hidden-size: 64\n  --num-attention-heads: 2\n  --seq-length: 64\n  --lr: 1e-4\n"
    batch = "  --micro-batch-size: 1\n  --global-batch-size: 1\n  --max-position-embeddings: 64\n  --vocab-size: 64\n"
    file.write_text(f"MODEL_ARGS:\n{sizes}{batch}  --tokenizer-type: NullTokenizer\n", encoding="utf-8")
    command = ["estimate", "--world-size", "1", "--megatron-yaml", str(file)]
    assert main(command) == 2
    assert "is a test of multimodal-llava, a model of images" in capsys.readouterr().err
    assert main([*command, "--", "pretrain_gpt.py"]) == 0
    assert "between steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "words", "tokens"),
    [
        ("pretrain_gpt.py", "", 50257),
        ("pretrain_bert.py", "--vocab-file none.txt", 30524),
        ("pretrain_t5.py", "--decoder-seq-length 8 --tokenizer-type BertWordPieceCase --vocab-extra-ids 100", 29098),
        ("pretrain_gpt.py", "--tokenizer-type NullTokenizer --vocab-size 131073", 131073),
        ("pretrain_gpt.py", "--tokenizer-type TikTokenizer", None),
        ("pretrain_gpt.py", "--vocab-file {}/vocab.json", 3),
        ("pretrain_bert.py", "--vocab-file {}/vocab.txt", 6),
    ],
)
def test_tokens_are_counted_or_those_of_the_usual_file(
    script: str, words: str, tokens: int | None, tmp_path: Path
) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "c": 2}', encoding="utf-8")
    (tmp_path / "vocab.txt").write_text("a\nb\nc\nd\n", encoding="utf-8")
    options = f"{GPT} --make-vocab-size-divisible-by 1 {words.format(tmp_path)}".split()
    command = split_command([script, *options])
    if tokens is None:
        with pytest.raises(ValueError, match="how many tokens TikTokenizer has cannot be read here; give --vocab-size"):
            read_command(command, world_size=8)
        return
    run, warnings = read_command(command, world_size=8)
    assert run.padded_vocab_size == tokens
    assert any(str(tokens) in warning for warning in warnings) == (tokens > 10 and tokens != 131073)


def test_the_families_differ_in_heads_and_segments() -> None:
    bert, t5 = (
        read(f"{GPT} {more}", f"pretrain_{family}.py").model
        for family, more in (("bert", "--spec local"), ("t5", "--decoder-seq-length 128"))
    )
    assert (bert.num_tokentypes, bert.add_binary_head, t5.decoder_seq_length) == (2, True, 128)


TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 16 --pipeline-model-parallel-size 2 --vocab-file none.json"
)


def test_the_estimate_of_a_command_has_each_stage_and_the_command_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    ours = f"estimate --gpu a100 --vocab-size 500 --json {figures} --all-ranks --tree".split()
    assert main([*ours, "--", *"torchrun --nproc-per-node 4 pretrain_gpt.py".split(), *TINY.split()]) == 0
    written = capsys.readouterr().out
    assert "Megatron-LM 0.19" in written and "largest" in written
    assert "torchrun --nproc-per-node 4 launch/run_megatron.py pretrain_gpt.py --num-layers 4" in written
    assert "Tempo, last stage, by the module that made it" in written and "      2-3, each of 2" in written
    found = json.loads(figures.read_text())
    for kind in ("stock", "tempo"):
        assert [row["modules"][0]["children"][-1]["name"] for row in found[kind]] == ["decoder", "output_layer"]
        assert [row["stage"] for row in found[kind]] == [0, 1]
        assert all(0 < row["at_rest_bytes"] < row["peak_bytes"] for row in found[kind])
    assert found["tempo"][0]["peak_bytes"] < found["stock"][0]["peak_bytes"]


def test_a_test_case_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = tmp_path / "bert" / "case" / "model_config.yaml"
    case.parent.mkdir(parents=True)
    text = "".join(f"  {name}: {value}\n" for name, value in zip(TINY.split()[::2], TINY.split()[1::2], strict=True))
    case.write_text(
        "ENV_VARS:\n  CUBLAS_WORKSPACE_CONFIG: :4096:8\n  PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True\n"
        f"MODEL_ARGS:\n{text}  --bf16: true\n",
        encoding="utf-8",
    )
    ours = f"estimate --vocab-size 500 --world-size 2 --megatron-yaml {case}".split()
    assert main(ours) == 0
    printed = capsys.readouterr().out
    assert "pretrain_bert.py, bf16, s 64, b 2, TP 1, PP 2, DP 1: 2 ranks" in printed
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python launch" in printed


def test_a_batch_that_grows_is_as_large_as_at_its_end() -> None:
    words = GPT.replace("--global-batch-size 32", "--step-batch-size-schedule '0:32 200B:64'")
    assert read(words).num_micro_batches == 2
    with pytest.raises(ValueError, match="expected when and how many samples"):
        read(words.replace("200B:64", "200B:x"))


_SCRIPT = f"""
MODEL=({TINY} $1)
mkdir -p logs; NODES=$(nvidia-smi -L | wc -l)
cd "$(dirname "$0")"
if [[ ${{2:-bf16}} == bf16 ]]; then MODEL+=("--bf16  --swiglu"); fi
export CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTORCH_ALLOC_CONF=expandable_segments:True
exec torchrun --nproc_per_node $GPUS pretrain_gpt.py --save "" ${{MODEL[@]}} 2>&1 | tee log.txt
"""


@pytest.mark.parametrize(
    ("script", "ours", "expected"),
    [
        (_SCRIPT, "", "pretrain_gpt.py, bf16, s 64, b 2, TP 2, PP 2, DP 2: 8 ranks"),
        (_SCRIPT, "--world-size 4", "pretrain_gpt.py, bf16, s 64, b 2, TP 2, PP 2, DP 1: 4 ranks"),
        (_SCRIPT.replace("2>&1 | tee", ">"), "", "log.txt: restricted: cannot redirect output"),
        (f"set -u; echo $3; {_SCRIPT}", "", "3: unbound variable"),
        ("torchrun --nproc_per_node 8 train.py", "", "starts no command of pretrain_gpt.py"),
        (f"[ -f nowhere.py ] || {{ echo No nowhere.py; exit 1; }}; {_SCRIPT}", "", "(No nowhere.py); give its own"),
        (f"{_SCRIPT}\ntorchrun pretrain_bert.py", "", "starts 2 commands of"),
        (_SCRIPT, "--megatron-yaml tests/conftest.py", "both given"),
    ],
)
def test_a_script_says_its_command_and_is_not_run(
    script: str,
    ours: str,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It knows what the environment says."""
    monkeypatch.setenv("GPUS", "8")
    file = tmp_path / "train it.sh"
    file.write_text(script, encoding="utf-8")
    words = [*f"estimate --vocab-size 500 {ours} --script".split(), str(file), "--"]
    status = main([*words, "--tensor-model-parallel-size 2"])
    written = capsys.readouterr()
    assert expected in (written.err if status else written.out)
    assert status or ("launch/run_megatron.py pretrain_gpt.py" in written.out and ":4096:8" in written.out)
    assert status or "PYTORCH_ALLOC_CONF=expandable_segments:True" in written.out
    assert [path.name for path in tmp_path.iterdir()] == ["train it.sh"]
    file.write_text("while true; do :; done", encoding="utf-8")
    with pytest.raises(ValueError, match="does not end within 0.1 s"):
        find_in_script(str(file), [], None, seconds=0.1)


@pytest.mark.slow
def test_the_plan_of_a_command_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    ours = "plan --recompute-allowed --gpu b200 --gpu-memory 1GiB --vocab-size 500 --world-size 2".split()
    assert main([*ours, "--", "pretrain_gpt.py", *TINY.split(), "--recompute-activations", "--bf16"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("python launch/run_megatron.py pretrain_gpt.py --num-layers 4")
    assert "--tempo-activation" in line and "--recompute-activations" not in line


_KINDS = (
    "--hybrid-layer-pattern M*-M --mamba-num-heads 16",
    "--hybrid-layer-pattern ME*E/*E/*E --position-embedding-type rope --num-experts 8",
    "--use-distributed-optimizer --use-megatron-fsdp",
)
_SIZES = (
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size", "num-experts"),
    *("expert-model-parallel-size", "num-layers-per-virtual-pipeline-stage", "num-layers", "num-attention-heads"),
    *("micro-batch-size", "global-batch-size", "seq-length", "mtp-num-layers", "moe-router-topk", "num-query-groups"),
)


def _draw_line(draw: random.Random) -> list[str]:
    """A line of `estimate` of a small run, with a size and an option that may not go with the rest."""
    words = f"{GPT} --vocab-size 512 --tokenizer-type NullTokenizer --tensor-model-parallel-size 2".split()
    for option, size in (("--num-layers", "4"), ("--hidden-size", "64"), ("--seq-length", "64")):
        words[words.index(option) + 1] = size
    words += draw.choice((*[""] * 9, *_KINDS)).split()
    words += [f"--{draw.choice(_SIZES)}", draw.choice("123448")]
    name = draw.choice(list(READ))
    if READ[name].kind is bool or READ[name].choices:
        words += [f"--{name}", *draw.sample(READ[name].choices or (), k=READ[name].kind is not bool)]
    return ["estimate", "--world-size", "8", "--", "pretrain_gpt.py", *words]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 11))])
def test_whatever_is_typed_is_an_estimate_or_one_sentence(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(seed)
    ends = dict.fromkeys(("estimate", "sentence"), 0)
    for _ in range(40):
        line = _draw_line(draw)
        status = main(line)
        printed, said = capsys.readouterr()
        sentences = [each for each in said.splitlines() if not each.startswith(("warning: ", "estimating "))]
        if status == 2:
            assert not printed and len(sentences) == 1 and len(sentences[0]) > 40, (line, printed, said)
        else:
            assert status in (0, 1) and "between steps" in printed and not sentences, (line, printed, said)
        ends["sentence" if status == 2 else "estimate"] += 1
    assert min(ends.values()) > 6, ends
