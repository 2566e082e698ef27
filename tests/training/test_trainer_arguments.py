"""The command line and the DeepSpeed JSON: what is filled in, and one sentence for what cannot be."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from run_configs import NEEDED, SIZES, decide, write_json
from training_job import zero

from tempo_megatron.cli import main
from tempo_megatron.training.config_command import main as show_config
from tempo_megatron.training.model import read_run
from tempo_megatron.training.run.arguments import build_parser, complete_run, parse_arguments
from tempo_megatron.training.run.checks import check_weights_fit
from tempo_megatron.training.run.deepspeed_config import (
    copy_deepspeed_config,
    offloads_optimizer,
    read_deepspeed_config,
)
from tempo_megatron.training.run.run_config import Masking, RunConfig
from tempo_megatron.words.deepspeed_json import REPLACED, find_unknown_keys

ROOT = Path(__file__).parents[2]
FULL, SELECTIVE = "--recompute-granularity full ", "--recompute-activations --recompute-modules "
BLOCK = FULL + "--recompute-method block "
TWO, CHUNK = "--pipeline-model-parallel-size 2 ", "--num-layers-per-virtual-pipeline-stage "
LAYOUT = "--pipeline-model-parallel-layout"
OF_PIPELINE = "--num-layers 8 --vocab-size 100 --global-batch-size 16 "
TP, EXPERTS = "--tensor-model-parallel-size 2 ", "--num-experts 4 --disable-bias-linear "
RAMP = "--global-batch-size 8 --rampup-batch-size "


@pytest.fixture(autouse=True)
def without_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed here."""
    monkeypatch.setitem(sys.modules, "wandb", None)


def prepared(folder: Path, *words: str, **options: Any) -> RunConfig:
    return decide(folder, *SIZES, *NEEDED, *words, **options)


def check_refused(folder: Path, sentence: str, *words: str, **options: Any) -> None:
    with pytest.raises(ValueError) as caught:
        prepared(folder, *words, **options)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def shorten(value: object) -> str:
    return str(value)[:60]


WRONG_ARGUMENTS = [
    ("--hiden-size 8", "unrecognized arguments: --hiden-size 8; the nearest known one is --hidden-size"),
    ("--num-lay 2", "unrecognized arguments: --num-lay 2"),
    ("--expert-model-parallel-size 2", "DeepSpeed's engine does not know Megatron's experts"),
    ("--num-layers two", "argument --num-layers: 'two' is not a whole number"),
    ("--num-layers 0", "0 is not at least 1"),
    ("--hidden-dropout 1", "1 is not in [0, 1)"),
    ("--lr nan", "nan is not a positive number"),
    ("--sequence-parallel", "--sequence-parallel needs --tensor-model-parallel-size of at least 2"),
    ("--global-batch-size 3", "--global-batch-size 3 is not a multiple of micro batch size 2 x data parallel"),
    ("--min-lr 1", "--min-lr 1.0 is above --lr 0.001"),
    ("--lr-warmup-iters 10", "--lr-warmup-iters 10 is not below the 10 steps of decay"),
    ("--bf16 --fp16", "--bf16 and --fp16 are both given"),
    ("--fp16", "the precision is fp16, but there is no GPU"),
    ("--bf16", "the precision is bf16 without ZeRO"),
    (SELECTIVE + "layernorm", "argument --recompute-modules: invalid choice: 'layernorm' (choose from"),
    ("--recompute-modules mlp", "add --recompute-granularity selective"),
    ("--recompute-method block", "add --recompute-granularity full"),
    (FULL, "full needs --recompute-method; give uniform or block"),
    (BLOCK + "--recompute-activations", "--recompute-activations is selective but --recompute-granularity is full"),
    (BLOCK + "--recompute-num-layers 3", "--recompute-num-layers 3 is more than the model's 2 layers"),
    ("--data-path 1 a 2", "--data-path has 3 words"),
    ("--data-path a b", "'a' stands where a weight is expected"),
    ("--data-path 0 b", "weight 0 is not positive"),
    ("--data-path 1e308 a 1e308 b", "the weights 1e308 1e308 have no finite sum"),
    ("--split 1e308,1e308", "--split '1e308,1e308' is not understood"),
    ("--split 9-1", "--split '9-1' is not understood"),
    ("--split 0,1", "--split '0,1' is not understood"),
    ("--split 1", "--split 1 leaves nothing for validation; add --eval-iters 0"),
    ("--vocab-file v", "--vocab-file is given without --merge-file"),
    ("--save-interval 5", "--save-interval is given without --save"),
    ("--keep-checkpoints 2", "--keep-checkpoints is given without --save"),
    ("--override-opt-param-scheduler", "--override-opt-param-scheduler is given without --load; give --load too"),
    ("--loss-plot a.png", "--loss-plot is given without --metrics-file"),
    ("--save /", "--save: / is the root folder; give one of its own"),
    (f"--log-dir {__file__}", f"--log-dir: {__file__}: {__file__} is a file; give a folder"),
    (f"--tensorboard-dir {__file__}/a", f"{__file__} is a file; give a folder"),
    ("--save s --loss-plot a.pdf", "does not end in .png"),
    ("--lr 1e-3 ''", "one of the arguments is an empty word; remove it"),
    ("--save ''", "--save is empty; give a value, or leave it out"),
    ("--seed 4294967296", "4294967296 is not below 4294967296"),
    ("--hidden-size " + "9" * 30, "is beyond 1000000000000, the largest number that is taken"),
    ("--fault-timeout 1", "1 is neither 0 nor from 5 to 1000000 seconds"),
    ("--use-tempo --tempo-layers " + "[" * 5000, "is not valid JSON (it is nested too deeply)"),
    ("--tempo-activation inplace", "--tempo-activation is given but Tempo is off; add --use-tempo"),
    ("--mask-prob 0.2", "unrecognized arguments: --mask-prob"),
    ("--num-workers 1025", "argument --num-workers: 1025 is more than 1024 processes a rank; give a few"),
    ("--lr-decay-style WSD", "without --lr-wsd-decay-iters"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 11", "more than the 10 steps that follow the warm-up"),
    ("--lr-wsd-decay-iters 3", "--lr-decay-style is linear; add --lr-decay-style WSD"),
    ("--eval-only", "--eval-only is given without --load; give --load too"),
    ("--test-iters 2 --split 9,1", "leaves nothing for --test-iters"),
    ("--profile 3", "give --profile-dir or --save"),
    ("--profile 11-12 --profile-dir x", "beyond --train-iters 10"),
    ("--profile 1-2 --profile-dir x --profile-ranks 1", "not one of the 1 ranks"),
    ("--profile 5-3", "no range of steps"),
    (RAMP + "2 2 0", "0 is not at least 1"),
    (RAMP + "8 2 40", "--rampup-batch-size 8 2 40 begins with 8 samples, which are not below --global-batch-size 8"),
    (RAMP + "4 8 40", "the 4 samples from 4 to --global-batch-size 8 are not a multiple of the increment 8"),
    (RAMP + "3 5 40", "the first size 3 is not a multiple of 2 = micro batch size 2 x data parallel size 1; change it"),
    (RAMP + "4 1 40", "the increment 1 is not a multiple of 2"),
]
# Megatron-LM's arguments for segments and masking, which GPT has not.
WRONG_OF_BERT = [
    (
        "--mask-prob 0",
        "argument --mask-prob: 0 leaves nothing to predict, or nothing to predict from; expected a share",
    ),
    ("--mask-prob 1", "1 leaves nothing to predict, or nothing to predict from"),
    ("--mask-prob 1.5", "1.5 is not in [0, 1]"),
    ("--seq-length 4", "--seq-length 4 has no room for two segments"),
    ("--seq-length 8", "expected --mask-prob of at least 0.2, or --seq-length of at least 10"),
    ("--mask-prob 1e-9", "--mask-prob 1e-09 of the 61 tokens that --seq-length 64 has besides"),
    ("--merge-file m", "--merge-file is given without --vocab-file"),
    ("--eod-mask-loss", "unrecognized arguments: --eod-mask-loss"),
]


# The DeepSpeed JSON, the words beside it, the sentence.
WRONG_CONFIGS: list[tuple[Any, str, str]] = [
    ("{", "", "is not valid JSON"),
    ("", "", "is not valid JSON (it is empty)"),
    ("[" * 5000, "", "is not valid JSON (it is nested too deeply)"),
    ("[1]", "", "holds a list; expected a JSON object"),
    ('{"bf16": {}, "bf16": {}}', "", "bf16 appears twice"),
    ('{"gradient_clipping": 1e999}', "", "1e999 is beyond the numbers that there are"),
    ({"gradient_cliping": 1}, "", '"gradient_cliping" is unknown; the nearest known name is "gradient_clipping"'),
    ({"zero": {"stage": 1}}, "", '"zero" is unknown; the nearest known name is "zero_optimization"'),
    ({"bfloat16": {"enabled": True}}, "", '"bfloat16" is unknown; the nearest known name is "bf16"'),
    ({"tempo_config": {}}, "", '"tempo_config" is unknown; the nearest known name is "tempo"'),
    ({"stage": 1}, "", '"stage" is at the top, where it is ignored; it belongs into "zero_opt'),
    ({"tempo": {"activaton": "off"}}, "", "the nearest known name is tempo.activation"),
    ({"tempo": {"memory_budget": "8GiB", "layers": {"0": {"norm": "off"}}}}, "", "tempo.memory_budget are both given"),
    ({"tempo": {"host_memory": "1GiB"}}, "", "tempo.host_memory is given without tempo.memory_budget"),
    ({"tempo": {"memory_budget": "1GiB", "offload": "all"}}, "", "leave tempo.offload out, and give tempo.host_memory"),
    ({"zero_optimization": {"stge": 1}}, "", 'the nearest known name is "zero_optimization.stage"'),
    ({"optimiser": {}}, "", 'known name is "optimizer", which is not used here: the trainer builds'),
    ({"optimizer": {"type": "Adam"}}, "", '"optimizer" is not used here: the trainer builds AdamW itself'),
    ({"scheduler": {}}, "", "use --lr-decay-style"),
    ({"activation_checkpointing": {}}, "", "use --recompute-granularity"),
    ({"tensor_parallel": {"autotp_size": 2}}, "", "use --tensor-model-parallel-size"),
    ({"checkpoint": {"writer": {"type": "fast"}}}, "", '"checkpoint.writer" is not used here'),
    ({"checkpoint": {"load_universal": "yes"}}, "", '"checkpoint.load_universal" is not used here'),
    ({"elasticity": {"enabled": True}}, "", '"elasticity" is not used here: the number of ranks is'),
    ({"progressive_layer_drop": {"enabled": True}}, "", "every layer is trained in every step"),
    ({"eigenvalue": {"enabled": True}}, "", '"eigenvalue" is not used here'),
    ({"compression_training": {}}, "", "compression in training is not supported; remove the block"),
    ({"wandb": {"enabled": True}}, "", '"wandb" in the DeepSpeed JSON needs wandb, which is not installed'),
    ({"train_micro_batch_size_per_gpu": 4}, "", "--micro-batch-size is 2 but"),
    ({"gradient_accumulation_steps": 3, "train_batch_size": 4}, "", '"gradient_accumulation_steps" in the'),
    ({"train_batch_size": 4}, "--global-batch-size 8", "--global-batch-size is 8 but"),
    ({"train_batch_size": "8"}, "", "\"train_batch_size\" is '8'; expected a whole number of at least 1 or"),
    ('{"gradient_clipping": NaN, # none\n}', "", "is not valid JSON (NaN is no number in JSON)"),
    (
        {"bf16": {"enabled": True, "loss_scale_window": 9}, **zero(1)},
        "",
        '"bf16.loss_scale_window" is unknown to DeepSpeed; it belongs into "fp16": move or remove it',
    ),
    (zero(1, offload_optimizer={"device": "cpu", "ratio": 0.5}), "", "DeepSpeed refuses it (Partial offloading only"),
    ({"tensorboard": {"enbled": True}}, "", 'is unknown to DeepSpeed; the nearest known name is "tensorboard.enabled"'),
    (zero(1, offload_optimizer={"devce": "cpu"}), "", 'known name is "zero_optimization.offload_optimizer.device"'),
    (zero(1, reduce_bucket_size=-1), "", '"zero_optimization.reduce_bucket_size" is -1, which DeepSpeed refuses'),
    ({"checkpoint": {"tag_validation": "x"}}, "", "DeepSpeed refuses it (Checkpoint config contains invalid"),
    (zero(1, cpu_offload="x"), "", "\"zero_optimization.cpu_offload\" is 'x'; expected true or false"),
    (zero(1, cpu_offload=True, offload_optimizer={"device": "cpu"}), "", 'replaces it: remove "cpu_offload"'),
    ({"gradient_clipping": 0.5}, "--clip-grad 1", '--clip-grad is 1.0 but "gradient_clipping"'),
    ({"gradient_clipping": -1}, "", '"gradient_clipping" is -1; expected a number of at least 0'),
    ({"bf16": {"enabled": False}}, "--bf16", '--bf16 is given but "bf16.enabled" in the DeepSpeed JSON is false'),
    ({"bf16": {"enabled": True}}, "--fp16", "enables bf16 and fp16"),
    ({"bf16": {"enabled": "maybe"}}, "", "\"bf16.enabled\" is 'maybe'; expected true or false"),
    ({"fp16": {"enabled": 2}}, "", '"fp16.enabled" is 2; expected true or false'),
    ({"memory_breakdown": "perhaps"}, "", "\"memory_breakdown\" is 'perhaps'; expected true or false"),
    ({"bf16": True}, "", '"bf16" is True; expected an object {...}'),
    ({"zero_optimization": None}, "", '"zero_optimization" is None; expected an object {...}'),
    ({"flops_profiler": "x"}, "", "\"flops_profiler\" is 'x'; expected an object {...}"),
    (zero("two"), "", "\"zero_optimization.stage\" is 'two'; expected 0"),  # type: ignore[arg-type]
    (zero(4), "", "is 4; expected 0, 1, 2 or 3"),
    (zero(0, offload_optimizer={"device": "cpu"}), "", "offload_optimizer needs ZeRO"),
    (zero(1, offload_optimizer={"device": "gpu"}), "", 'device" is \'gpu\'; expected "none" or "cpu" or "nvme"'),
    (zero(1, offload_param={"device": "cpu"}), "", "needs partitioned parameters, but zero_optimization.stage is 1"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "", "without ZeRO gradients are fp32"),
    ({"data_types": {"grad_accum_dtype": "fp64"}}, "", 'is \'fp64\'; expected "fp32" or "bf16" or "fp16"'),
    ({"communication_data_type": "fp8"}, "", 'is \'fp8\'; expected "fp32" or "bf16" or "fp16"'),
    ({"log_level": "x"}, "", '"log_level" is \'x\'; expected "debug" or "info" or'),
]


BF16_SUMS = {"bf16": {"enabled": True, "immediate_grad_update": False}, **zero(1)}
LAYOUTS: list[tuple[int, str, dict[str, Any], str]] = [
    (3, "--tensor-model-parallel-size 2", {}, "--tensor-model-parallel-size 2 does not divide the 3 processes"),
    (3, TWO, {}, "parallel-size 1 times --pipeline-model-parallel-size 2 does not divide the 3"),
    (3, TWO + "--pipeline-model-parallel-size 3 --global-batch-size 18", {}, "--num-layers 8 is not a multiple of"),
    (1, CHUNK + "2", {}, "needs --pipeline-model-parallel-size of at least 2"),
    (2, TWO + CHUNK + "4", {}, "4 does not divide the 4 layers of a pipeline stage into at least 2 chunks"),
    (2, TWO + CHUNK + "3", {}, "3 does not divide the 4 layers of a pipeline stage"),
    (2, TWO + CHUNK + "2 --global-batch-size 6", {}, "a step has 3 micro batches, which are not a multiple of"),
    (2, TWO + CHUNK + "2 --use-tempo --tempo-memory-budget 1GB", {}, "chunks the planner does not know"),
    (2, TWO + CHUNK + f"2 {BLOCK} --recompute-num-layers 3", {}, "3 is more than a chunk's 2 layers"),
    (2, TWO + f"{BLOCK} --recompute-num-layers 5", {}, "5 is more than a pipeline stage's 4 layers"),
    (2, f"{TWO} {LAYOUT} Ettt|tL", {}, f"{LAYOUT} Ettt|tL is not E, 8 times t and L, in chunks with | between"),
    (2, f"{TWO} {LAYOUT} Et*2|t*3|t*3L", {}, "has 3 chunks, which are not a multiple of"),
    (2, f"{TWO} {LAYOUT} E|t*8L", {}, "E|t*8L gives stage 0 no layer; give it at"),
    (1, f"{LAYOUT} Et*8L", {}, "Et*8L needs --pipeline-model-parallel-size of at least 2"),
    (2, f"{TWO} {LAYOUT} Et*4|t*4L {CHUNK} 2", {}, "Et*4|t*4L are both given; leave one of them"),
    (2, f"{TWO} {LAYOUT} Et*4|t*4L --use-tempo --tempo-memory-budget 1GB", {}, "whose chunks the planner does"),
    (2, TWO, zero(2), "ZeRO 2, which reduces gradients in each of the backward"),
    (2, TWO, zero(3), "set zero_optimization.stage to 0 or 1"),
    (2, TWO, zero(1, overlap_comm=True), "zero_optimization.overlap_comm"),
    (2, TWO, BF16_SUMS, "would add up micro batches in bf16"),
    (2, TWO, {"flops_profiler": {"enabled": True}}, 'with "flops_profiler", but DeepSpeed sees no micro'),
    (2, TWO, {"wall_clock_breakdown": True}, 'with "wall_clock_breakdown", but DeepSpeed sees no micro'),
    (2, EXPERTS + TP, {}, "which Megatron trains with --sequence-parallel only; add it"),
    (2, EXPERTS + TWO, {}, "with --pipeline-model-parallel-size 2, and the trainer has experts in one stage only"),
    (1, EXPERTS + "--no-disable-bias-linear", {}, "which Megatron-core's SequentialMLP adds in place where autograd"),
    (
        *(1, EXPERTS + "--moe-router-score-function sigmoid --moe-router-enable-expert-bias", {}),
        "--moe-router-enable-expert-bias, a buffer that the trainer neither updates nor brings to another layout",
    ),
    (1, EXPERTS + "--moe-expert-capacity-factor 1", {}, "experts with --moe-expert-capacity-factor"),
    (
        1,
        EXPERTS + "--use-tempo --tempo-memory-budget 1GiB",
        {},
        "a memory budget is given, and the planner does not know",
    ),
]
T5 = [
    ("--decoder-seq-length 2", "--decoder-seq-length 2 has no room for [BOS], a sentinel and a token"),
    (TWO, "encoder and decoder of Megatron's T5 stand in one process"),
]
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    *((*row, {}) for row in WRONG_ARGUMENTS),
    *((*row, {"family": "bert"}) for row in WRONG_OF_BERT),
    *((*row, {"family": "t5", "world_size": 2}) for row in T5),
    *((words, said, {"config": config}) for config, words, said in WRONG_CONFIGS),
    *((OF_PIPELINE + words, said, {"config": config, "world_size": n}) for n, words, config, said in LAYOUTS),
]


@pytest.mark.parametrize(("words", "sentence", "options"), REFUSED, ids=shorten)
def test_what_cannot_train_is_one_sentence(tmp_path: Path, words: str, sentence: str, options: dict[str, Any]) -> None:
    check_refused(tmp_path, sentence, *shlex.split(words), **options)


HJSON = """{
  // why
  "zero_optimization": {"stage": 2, %s},
  bf16: {
    # without quotes
    enabled: yes
  },
}"""
ESTIMATE = ["estimate", "--model", str(ROOT / "configs/model/gpt2_tiny.json"), "--dp", "2"]


def test_the_trainer_and_the_estimate_read_one_json_as_deepspeed_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {}
    for words in ('"offload_optimizer": {"device": "cpu"}', '"cpu_offload": true', '"cpu_offload": false'):
        run = prepared(tmp_path, "--micro-batch-size", "1", config=HJSON % words)
        assert run.precision == "bf16" and offloads_optimizer(run.deepspeed) == ("false" not in words)
        assert main([*ESTIMATE, *write_json(tmp_path, HJSON % words)]) == 0
        told[words] = capsys.readouterr().out
    offloaded, deprecated, on_the_device = told.values()
    assert deprecated == offloaded != on_the_device


@pytest.mark.parametrize(
    "config", ['{"gradient_clipping": NaN}', '{"x": 1, "x": 2, /* */}', '{"gradient_clipping": -1}']
)
def test_the_trainer_and_the_estimate_refuse_a_json_in_one_sentence(
    tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="--deepspeed_config") as refused:
        prepared(tmp_path, config=config)
    assert main([*ESTIMATE, *write_json(tmp_path, config)]) == 2
    assert capsys.readouterr().err == f"tempo-megatron estimate: {refused.value}\n"


def test_deprecated_names_of_zero_are_those_of_deepspeed() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    blocks = ("offload_optimizer", "offload_param")
    extras = {name: field.json_schema_extra or {} for name, field in DeepSpeedZeroConfig.model_fields.items()}
    assert {name: extra["new_param"] for name, extra in extras.items() if extra.get("new_param") in blocks} == REPLACED


def test_a_layout_says_which_layers_a_stage_has(tmp_path: Path) -> None:
    two = [*OF_PIPELINE.split(), *TWO.split(), LAYOUT]
    uneven = prepared(tmp_path, *two, "Ett,t|t*5L", world_size=2)
    assert uneven.num_chunks == 1 and read_run(uneven, 128).list_chunks(1) == [range(3, 8)]
    chunks = prepared(tmp_path, *two, "E(t|t)*2t*3|tL", world_size=2)
    assert chunks.num_chunks == 2 and read_run(chunks, 128).list_chunks(0) == [range(0, 1), range(3, 7)]


def test_a_pipeline_with_an_older_deepspeed_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.18.9")
    check_refused(tmp_path, "needs DeepSpeed 0.19, and 0.18.9 is installed", *TWO.split(), world_size=2)
    assert prepared(tmp_path).pipeline_model_parallel_size == 1


def test_stages_chunks_and_data_parallel_ranks_are_divided(tmp_path: Path) -> None:
    words = [*OF_PIPELINE.split(), *TWO.split(), *CHUNK.split(), "2", "--tensor-model-parallel-size", "2"]
    run = prepared(tmp_path, *words, config=zero(1), world_size=8)
    assert (run.data_parallel_size, run.num_chunks, run.num_micro_batches) == (2, 2, 4)
    estimated = read_run(run, 128)
    assert estimated.layout.world_size == 8 and estimated.list_chunks(1) == [range(2, 4), range(6, 8)]
    eight_layers = 8 * 64 * (4 * 64 + 2 * 256) * 4  # float32 bytes of their linears
    check_weights_fit(run, node_bytes=eight_layers // 4, node_ranks=1)
    with pytest.raises(ValueError, match="the linears of 8 layers"):
        check_weights_fit(run, node_bytes=eight_layers // 4 - 1, node_ranks=1)


def test_a_model_that_no_memory_holds_is_refused_before_it_is_built(tmp_path: Path) -> None:
    run = prepared(tmp_path, "--num-layers", "1000000000000", "--tensor-model-parallel-size", "2", world_size=2)
    with pytest.raises(ValueError, match=r"have 49,152,000,000,000,000 weights, of which this node would hold"):
        check_weights_fit(run, 2**50, 2)
    fits = prepared(tmp_path)
    check_weights_fit(fits, 2 * 49152 * 4, 1)
    with pytest.raises(ValueError, match=r"would hold 384\.00 KiB, and it has 97\.66 KiB of"):
        check_weights_fit(fits, 100_000, 1)


def test_the_estimate_takes_recomputation_as_megatron_does(tmp_path: Path) -> None:
    for method, num_layers in ((["block", "--recompute-num-layers", "1"], 1), (["uniform"], None)):
        run = prepared(tmp_path, *FULL.split(), "--recompute-method", *method)
        found = read_run(run, 512)
        assert (found.recompute, found.recompute_num_layers) == (("full",), num_layers)
        assert found.padded_vocab_size == 512
    with pytest.raises(ValueError, match="uniform recomputes 2 layers together, and the estimate knows each layer"):
        read_run(dataclasses.replace(run, recompute_num_layers=2), 512)


def test_a_run_is_only_read_once_it_is_built(tmp_path: Path) -> None:
    options = [*SIZES, *NEEDED, *SELECTIVE.split(), "mlp", "core_attn"]
    args = parse_arguments([*write_json(tmp_path, {"betas": [0.9, [0.95]]}), *options])
    typed, read = copy.deepcopy(vars(args)), read_deepspeed_config(args.deepspeed_config)
    as_read = copy.deepcopy(read)
    run = complete_run(args, read, None, world_size=1, on_gpu=False)
    assert vars(args) == typed and read == as_read
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.lr = 1.0  # type: ignore[misc]
    for block in (run.deepspeed, run.deepspeed["zero_optimization"]):
        with pytest.raises(TypeError):
            block["stage"] = 3
    lists = [field.name for field in dataclasses.fields(run) if isinstance(getattr(run, field.name), (list, set))]
    assert lists == [] and hash((run.data_path, run.blend, run.recompute_modules))
    copied = copy_deepspeed_config(run.deepspeed)
    copied["zero_optimization"]["stage"] = 3
    assert run.deepspeed["zero_optimization"]["stage"] == 0 and isinstance(copied["betas"], list)


def test_auto_and_absent_values_are_filled(tmp_path: Path) -> None:
    config = {"train_batch_size": "auto", "gradient_clipping": "auto", **zero(1)}
    run = prepared(tmp_path, "--global-batch-size", "24", "--bf16", config=config, world_size=3)
    completed = run.deepspeed
    assert completed["train_batch_size"] == 24
    assert completed["train_micro_batch_size_per_gpu"] == 2
    assert completed["gradient_accumulation_steps"] == run.num_micro_batches == 4
    assert completed["gradient_clipping"] == run.clip_grad == 1.0
    assert completed["bf16"] == {"enabled": True} and run.precision == "bf16"
    assert run.lr_decay_iters == 10


def test_values_of_the_json_count_where_the_command_line_is_silent(tmp_path: Path) -> None:
    config = {"gradient_accumulation_steps": 5, "gradient_clipping": 0.25}
    run = prepared(tmp_path, config=config, world_size=2)
    assert (run.global_batch_size, run.num_micro_batches, run.clip_grad) == (20, 5, 0.25)


def test_a_name_of_the_users_own_is_not_refused(tmp_path: Path) -> None:
    config = {"comment": "mine", "_notes": [1], "x": 1, "log_level": "INFO", "communication_data_type": "BF16"}
    assert find_unknown_keys(prepared(tmp_path, config=config).deepspeed) == ["comment", "_notes", "x"]


BOOLEANS = {"true": True, "yes": True, 1: True, "1": True, "on": True, "false": False, 0: False, "No": False}


@pytest.mark.parametrize(("value", "enabled"), BOOLEANS.items(), ids=repr)
def test_booleans_of_the_json_are_read_as_deepspeed_reads_them(tmp_path: Path, value: Any, enabled: bool) -> None:
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config

    config = {"bf16": {"enabled": value}, **zero(1), "checkpoint": {"load_universal": "false"}}
    run = prepared(tmp_path, config=config)
    assert run.precision == ("bf16" if enabled else "fp32")
    assert run.deepspeed["bf16"]["enabled"] is enabled is DeepSpeedBF16Config(**config["bf16"]).enabled


def test_sizes_come_from_a_file_and_an_argument_wins(tmp_path: Path) -> None:
    file = ["--model", str(ROOT / "configs/model/gpt2_124m.json")]
    shape = decide(tmp_path, *NEEDED, *file, "--num-layers", "3").model
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (3, 768, 50257)
    assert (shape.ffn_hidden_size, shape.max_position_embeddings) == (3072, 1024)
    with pytest.raises(ValueError, match="--hidden-size is missing; give it, or --model"):
        decide(tmp_path, *NEEDED, "--num-layers", "2")
    with pytest.raises(ValueError, match="--lr is missing; give the highest learning rate"):
        decide(tmp_path, *SIZES, *"--micro-batch-size 2 --train-iters 10 --data-path text".split())


def test_masking_is_megatrons_by_default_and_of_bert_alone(tmp_path: Path) -> None:
    run = prepared(tmp_path, family="bert")
    assert run.masking == Masking(mask_prob=0.15, short_seq_prob=0.1, masking="words")
    assert (run.model.family, run.model.add_binary_head, run.model.num_tokentypes) == ("bert", True, 2)
    assert prepared(tmp_path).masking is None
    (tmp_path / "model.json").write_text(json.dumps({"family": "bert", "add_binary_head": False}))
    for words in (["--bert-no-binary-head"], ["--model", str(tmp_path / "model.json")]):
        run = prepared(tmp_path, *words, family="bert")
        assert (run.model.add_binary_head, run.model.num_tokentypes) == (False, 0)
    assert prepared(tmp_path, "--vocab-file", "vocab.txt", family="bert").vocab_file == "vocab.txt"


def test_what_the_end_of_a_run_needs_is_asked_for_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = ["--save", str(tmp_path / "save")]
    assert prepared(tmp_path, *save).loss_plot is not None
    (tmp_path / "file").touch()
    sentence = "loss.png cannot be written, the folder"
    check_refused(tmp_path, sentence, *save, "--loss-plot", str(tmp_path / "file" / "loss.png"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    check_refused(tmp_path, "loss.png needs matplotlib, which is not installed; pip install matplotlib", *save)


def test_a_file_that_is_not_one_of_metrics_is_never_written_over(tmp_path: Path) -> None:
    novel, sentence = tmp_path / "novel.txt", "exists and does not hold metrics of a run; give another name"
    for content in ("It was a dark and stormy night.\n", '{"text": "of mine"}\n', "[1]\n"):
        novel.write_text(content)
        check_refused(tmp_path, sentence, "--metrics-file", str(novel))
        assert novel.read_text() == content
    novel.write_bytes(b"\x89PNG\xff\n")
    check_refused(tmp_path, "is not a file of metrics", "--metrics-file", str(novel))


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "deepspeed").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_deepspeed_configurations_are_what_their_names_say(tmp_path: Path, path: Path) -> None:
    run = prepared(tmp_path, config=path.read_text(), on_gpu=True)
    assert path.stem == f"zero{run.deepspeed['zero_optimization']['stage']}_{run.precision}"


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_every_argument_has_a_help_text_that_names_no_module_that_is_always_refused(family: str) -> None:
    parser = build_parser(family)
    assert [action.option_strings for action in parser._actions if not action.help] == []
    assert "{core_attn,mlp}" in parser.format_help()


def test_config_show_says_where_each_value_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = write_json(tmp_path, {"gradient_clipping": 0.5, **zero(1), "tempo": {"norm": "off"}})
    model = str(ROOT / "configs/model/gpt2_tiny.json")
    argv = [*named, "--model", model, "--num-layers", "2", *NEEDED]
    assert show_config(["--show", "--world-size", "2", *argv, "--use-tempo", "--tempo-loss", "off"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["clip_grad"] == ["0.5", "JSON", '"gradient_clipping"']
    assert rows["model.num_layers"] == ["2", "argument", "--num-layers"]
    assert rows["model.hidden_size"] == ["256", "--model", model]
    assert rows["global_batch_size"] == ["4", "default"] and rows["seed"] == ["1234", "default"]
    assert rows["tempo.norm"] == ["off", "JSON"] and rows["tempo.loss"] == ["off", "argument", "--tempo-loss"]
    assert rows["deepspeed.zero_optimization.stage"] == ["1", "JSON"] and rows["data_parallel_size"][1] == "computed"
    with pytest.raises(ValueError, match="the nearest known one is --hidden-size"):
        show_config(["--show", *argv, "--hiden-size", "8"])
