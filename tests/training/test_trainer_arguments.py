"""The command line and the DeepSpeed JSON: what is filled in, and one sentence for what cannot be."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tempo_megatron.settings.operations import OPERATIONS
from tempo_megatron.training.planning import read_run
from tempo_megatron.training.run.arguments import parse_arguments
from tempo_megatron.training.run.checks import check_run, check_weights_fit
from tempo_megatron.training.run.deepspeed_config import copy_deepspeed_config, find_unknown_keys, read_deepspeed_config
from tempo_megatron.training.run.run_config import RunConfig, complete_run

ROOT = Path(__file__).parents[2]
SIZES = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"]
REST = ["--micro-batch-size", "2", "--train-iters", "10", "--lr", "1e-3", "--data-path", "text"]


def prepared(
    folder: Path,
    *extra: str,
    config: dict[str, Any] | str | None = None,
    world_size: int = 1,
    on_gpu: bool = False,
    sizes: Sequence[str] = SIZES,
) -> RunConfig:
    """What main() does before it starts: the completed and checked run."""
    path = folder / "deepspeed.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config or {}), encoding="utf-8")
    args = parse_arguments(["--deepspeed_config", str(path), *sizes, *REST, *extra])
    typed, read = copy.deepcopy(vars(args)), read_deepspeed_config(str(path))
    as_read = copy.deepcopy(read)
    run = complete_run(args, read, None, world_size=world_size, on_gpu=on_gpu)
    check_run(run)
    assert vars(args) == typed and read == as_read
    return run


def refusal(folder: Path, *extra: str, config: dict[str, Any] | str | None = None, world_size: int = 1) -> str:
    """The one sentence that the command line and the JSON are refused with."""
    with pytest.raises(ValueError) as caught:
        prepared(folder, *extra, config=config, world_size=world_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("method", "recompute_num_layers"), [(["block", "--recompute-num-layers", "1"], 1), (["uniform"], None)]
)
def test_the_estimate_takes_recomputation_as_megatron_does(
    tmp_path: Path, method: list[str], recompute_num_layers: int | None
) -> None:
    run = prepared(tmp_path, "--recompute-granularity", "full", "--recompute-method", *method)
    found = read_run(run, 512)
    assert (found.recompute, found.recompute_num_layers) == (("full",), recompute_num_layers)
    assert found.padded_vocab_size == 512
    with pytest.raises(ValueError, match="uniform recomputes 2 layers together, and the estimate knows each layer"):
        read_run(dataclasses.replace(run, recompute_method="uniform", recompute_num_layers=2), 512)


def test_a_run_is_only_read_once_it_is_built(tmp_path: Path) -> None:
    options = ["--recompute-activations", "--recompute-modules", "mlp", "core_attn"]
    run = prepared(tmp_path, *options, config={"betas": [0.9, [0.95]]})
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.lr = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        run.deepspeed["train_batch_size"] = 1  # type: ignore[index]
    with pytest.raises(TypeError):
        run.deepspeed["zero_optimization"]["stage"] = 3
    lists = [field.name for field in dataclasses.fields(run) if isinstance(getattr(run, field.name), (list, dict, set))]
    assert lists == [] and hash((run.data_path, run.blend, run.recompute_modules))
    copied = copy_deepspeed_config(run.deepspeed)
    copied["zero_optimization"]["stage"] = 3
    assert run.deepspeed["zero_optimization"]["stage"] == 0 and isinstance(copied["betas"], list)


WRONG_ARGUMENTS = {
    "unknown": (
        ["--hiden-size", "8"],
        "unrecognized arguments: --hiden-size 8; the nearest known one is --hidden-size",
    ),
    "abbreviated": (["--num-lay", "2"], "unrecognized arguments: --num-lay 2"),
    "not a number": (["--num-layers", "two"], "argument --num-layers: 'two' is not a whole number"),
    "zero layers": (["--num-layers", "0"], "0 is not at least 1"),
    "dropout of 1": (["--hidden-dropout", "1"], "1 is not in [0, 1)"),
    "lr of nan": (["--lr", "nan"], "nan is not a positive number"),
    "decay style": (["--lr-decay-style", "cosin"], "invalid choice: 'cosin'"),
    "heads and hidden size": (
        ["--num-attention-heads", "5"],
        "--hidden-size 64 is not a multiple of --num-attention-heads 5",
    ),
    "positions": (["--max-position-embeddings", "32"], "--seq-length 64 is more than the 32 learned positions"),
    "sp without tp": (["--sequence-parallel"], "--sequence-parallel needs --tensor-model-parallel-size of at least 2"),
    "batch": (
        ["--global-batch-size", "3"],
        "--global-batch-size 3 is not a multiple of micro batch size 2 x data parallel",
    ),
    "min lr": (["--min-lr", "1"], "--min-lr 1.0 is above --lr 0.001"),
    "warmup": (["--lr-warmup-iters", "10"], "--lr-warmup-iters 10 is not below the 10 steps of decay"),
    "bf16 and fp16": (["--bf16", "--fp16"], "--bf16 and --fp16 are both given"),
    "fp16 on cpu": (["--fp16"], "the precision is fp16, but there is no GPU"),
    "bf16 without zero": (["--bf16"], "the precision is bf16 without ZeRO"),
    "recompute layernorm": (
        ["--recompute-granularity", "selective", "--recompute-modules", "layernorm"],
        "--recompute-modules layernorm cannot be used: without Transformer Engine megatron-core stops in it",
    ),
    "recompute moe_act": (
        ["--recompute-activations", "--recompute-modules", "moe_act"],
        "--recompute-modules moe_act cannot be used: the model has no such module",
    ),
    "recompute modules alone": (["--recompute-modules", "mlp"], "add --recompute-granularity selective"),
    "recompute method alone": (["--recompute-method", "block"], "add --recompute-granularity full"),
    "full without method": (
        ["--recompute-granularity", "full"],
        "full needs --recompute-method; give uniform or block",
    ),
    "full and selective": (
        ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-activations"],
        "--recompute-activations is selective but --recompute-granularity is full",
    ),
    "recompute too many layers": (
        ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "3"],
        "--recompute-num-layers 3 is more than the model's 2 layers",
    ),
    "odd blend": (["--data-path", "1", "a", "2"], "--data-path has 3 words"),
    "blend weight": (["--data-path", "a", "b"], "'a' stands where a weight is expected"),
    "negative weight": (["--data-path", "0", "b"], "weight 0 is not positive"),
    "weights without a sum": (
        ["--data-path", "1e308", "a", "1e308", "b"],
        "the weights 1e308 1e308 have no finite sum",
    ),
    "split without a sum": (["--split", "1e308,1e308"], "--split '1e308,1e308' is not understood"),
    "split": (["--split", "9-1"], "--split '9-1' is not understood"),
    "split without training": (["--split", "0,1"], "--split '0,1' is not understood"),
    "split without validation": (["--split", "1"], "--split 1 leaves nothing for validation; add --eval-iters 0"),
    "vocab alone": (["--vocab-file", "v"], "--vocab-file is given without --merge-file"),
    "interval alone": (["--save-interval", "5"], "--save-interval is given without --save"),
    "keep alone": (["--keep-checkpoints", "2"], "--keep-checkpoints is given without --save"),
    "keep none": (["--save", "s", "--keep-checkpoints", "0"], "0 is not at least 1"),
    "override alone": (["--override-opt-param-scheduler"], "changes what --load brings"),
    "plot alone": (["--loss-plot", "a.png"], "--loss-plot is drawn from the metrics file"),
    "save to the root": (["--save", "/"], "--save / is the root folder; give one of its own"),
    "logs in a file": (["--log-dir", __file__], f"--log-dir {__file__}: {__file__} is a file; give a folder"),
    "below a file": (["--tensorboard-dir", f"{__file__}/a"], f"{__file__} is a file; give a folder"),
    "plot of another kind": (["--save", "s", "--loss-plot", "a.pdf"], "does not end in .png"),
    "empty word": (["--lr", "1e-3", ""], "one of the arguments is an empty word; remove it"),
    "empty": (["--save", ""], "--save is empty; give a value, or leave it out"),
    "seed": (["--seed", "4294967296"], "4294967296 is not below 4294967296"),
    "beyond memory": (["--hidden-size", "9" * 30], "is beyond 1000000000000, the largest number that is taken"),
    "heartbeat": (["--heartbeat-seconds", "1"], "1 is neither 0 nor from 5 to 1000000 seconds"),
    "nested layers": (["--use-tempo", "--tempo-layers", "[" * 5000], "is not valid JSON (it is nested too deeply)"),
    "tempo off": (["--tempo-activation", "inplace"], "--tempo-activation is given but Tempo is off; add --use-tempo"),
}


@pytest.mark.parametrize(("extra", "words"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_a_wrong_argument_is_one_sentence(tmp_path: Path, extra: list[str], words: str) -> None:
    assert words in refusal(tmp_path, *extra)


WRONG_CONFIGS = {
    "not json": ("{", "is not valid JSON"),
    "a list": ("[1]", "holds a list; expected a JSON object"),
    "twice": ('{"bf16": {}, "bf16": {}}', "bf16 appears twice"),
    "misspelt": (
        {"gradient_cliping": 1},
        '"gradient_cliping" is unknown; the nearest known name is "gradient_clipping"',
    ),
    "optimizer": ({"optimizer": {"type": "Adam"}}, '"optimizer" is not used here: the trainer builds AdamW itself'),
    "scheduler": ({"scheduler": {}}, "use --lr-decay-style"),
    "checkpointing": ({"activation_checkpointing": {}}, "use --recompute-granularity"),
    "autotp": ({"tensor_parallel": {"autotp_size": 2}}, "use --tensor-model-parallel-size"),
    "decoupled": ({"checkpoint": {"writer": {"type": "fast"}}}, '"checkpoint.writer" is not used here'),
    "micro batch": ({"train_micro_batch_size_per_gpu": 4}, "--micro-batch-size is 2 but"),
    "accumulation": ({"gradient_accumulation_steps": 3, "train_batch_size": 4}, '"gradient_accumulation_steps" in the'),
    "text for a number": ({"train_batch_size": "8"}, "\"train_batch_size\" in the DeepSpeed JSON is '8'"),
    "both halves": ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "enables bf16 and fp16"),
    "stage 4": ({"zero_optimization": {"stage": 4}}, "is 4; expected 0, 1, 2 or 3"),
    "offload without zero": (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "offload_optimizer needs ZeRO",
    ),
    "parameters offloaded": (
        {"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param needs partitioned parameters, but zero_optimization.stage is 1",
    ),
    "accumulated in bf16": ({"data_types": {"grad_accum_dtype": "bf16"}}, "without ZeRO gradients are fp32"),
    "elasticity": ({"elasticity": {"enabled": True}}, '"elasticity" is not used here: the number of ranks is'),
    "layer drop": ({"progressive_layer_drop": {"enabled": True}}, "every layer is trained in every step"),
    "eigenvalue": ({"eigenvalue": {"enabled": True}}, '"eigenvalue" is not used here'),
    "compression": ({"compression_training": {}}, "compression in training is not supported; remove the block"),
    "accumulated in fp64": (
        {"data_types": {"grad_accum_dtype": "fp64"}, "zero_optimization": {"stage": 1}},
        '"data_types.grad_accum_dtype" is \'fp64\'; expected "fp32" or "bf16" or "fp16"',
    ),
    "sent in fp8": ({"communication_data_type": "fp8"}, 'is \'fp8\'; expected "fp32" or "bf16" or "fp16"'),
    "sent in 8": ({"seq_parallel_communication_data_type": 8}, '"seq_parallel_communication_data_type" is 8; expected'),
    "log level": ({"log_level": "x"}, '"log_level" is \'x\'; expected "debug" or "info" or'),
    "zero": ({"zero": {"stage": 1}}, '"zero" is unknown; the nearest known name is "zero_optimization"'),
    "bfloat16": ({"bfloat16": {"enabled": True}}, '"bfloat16" is unknown; the nearest known name is "bf16"'),
    "tempo config": ({"tempo_config": {}}, '"tempo_config" is unknown; the nearest known name is "tempo"'),
    "batch size": ({"batch_size": 8}, '"batch_size" is unknown; the nearest known name is "train_batch_size"'),
    "stage at the top": ({"stage": 1}, '"stage" is at the top, where it is ignored; it belongs into "zero_opt'),
    "wandb": ({"wandb": {"enabled": True}}, '"wandb" in the DeepSpeed JSON needs wandb, which is not installed'),
    "tempo block": ({"tempo": {"activaton": "off"}}, "the nearest known name is tempo.activation"),
}


@pytest.mark.parametrize(("config", "words"), WRONG_CONFIGS.values(), ids=WRONG_CONFIGS)
def test_a_wrong_deepspeed_json_is_one_sentence(tmp_path: Path, config: Any, words: str) -> None:
    assert words in refusal(tmp_path, config=config)


@pytest.fixture(autouse=True)
def without_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed here."""
    monkeypatch.setitem(sys.modules, "wandb", None)


def test_a_name_of_the_users_own_is_not_refused(tmp_path: Path) -> None:
    config = {"comment": "mine", "_notes": [1], "x": 1, "log_level": "INFO", "communication_data_type": "BF16"}
    assert find_unknown_keys(prepared(tmp_path, config=config).deepspeed) == ["comment", "_notes", "x"]


def test_what_the_end_of_a_run_needs_is_asked_for_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = ["--save", str(tmp_path / "save")]
    assert prepared(tmp_path, *save).loss_plot is not None
    (tmp_path / "file").touch()
    said = refusal(tmp_path, *save, "--loss-plot", str(tmp_path / "file" / "loss.png"))
    assert "loss.png cannot be written, the folder" in said
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = refusal(tmp_path, *save)
    assert "loss.png needs matplotlib, which is not installed; pip install matplotlib" in said


CONTRADICTIONS = {
    "--bf16": (
        {"bf16": {"enabled": False}},
        ["--bf16"],
        '--bf16 is given but "bf16.enabled" in the DeepSpeed JSON is false',
    ),
    "--fp16": ({"bf16": {"enabled": True}}, ["--fp16"], "enables bf16 and fp16"),
    "--clip-grad": ({"gradient_clipping": 0.5}, ["--clip-grad", "1"], '--clip-grad is 1.0 but "gradient_clipping"'),
    "--global-batch-size": ({"train_batch_size": 4}, ["--global-batch-size", "8"], "--global-batch-size is 8 but"),
}


@pytest.mark.parametrize(("config", "extra", "words"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_command_line_and_json_may_not_contradict(
    tmp_path: Path, config: dict[str, Any], extra: list[str], words: str
) -> None:
    assert words in refusal(tmp_path, *extra, config=config)


def test_tensor_parallel_size_has_to_divide_the_processes(tmp_path: Path) -> None:
    said = refusal(tmp_path, "--tensor-model-parallel-size", "2", world_size=3)
    assert "--tensor-model-parallel-size 2 does not divide the 3 processes" in said


def test_auto_and_absent_values_are_filled(tmp_path: Path) -> None:
    config = {"train_batch_size": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 1}}
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


def test_sizes_come_from_a_file_and_an_argument_wins(tmp_path: Path) -> None:
    file = ["--model", str(ROOT / "configs/model/gpt2_124m.json")]
    shape = prepared(tmp_path, *file, "--num-layers", "3", sizes=[]).model
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (3, 768, 50257)
    assert (shape.ffn_hidden_size, shape.max_position_embeddings) == (3072, 1024)
    wrong = tmp_path / "model.json"
    wrong.write_text('{"num_layer": 2}')
    assert "num_layer is unknown; the nearest known name is num_layers" in refusal(tmp_path, "--model", str(wrong))
    with pytest.raises(ValueError, match="--hidden-size is missing; give it, or --model"):
        prepared(tmp_path, "--num-layers", "2", sizes=[])


def test_a_model_that_no_memory_holds_is_refused_before_it_is_built(tmp_path: Path) -> None:
    run = prepared(tmp_path, "--num-layers", "1000000000000", "--tensor-model-parallel-size", "2", world_size=2)
    with pytest.raises(ValueError, match=r"have 49,152,000,000,000,000 weights, of which this node would hold"):
        check_weights_fit(run, 2**50, 2)
    fits = prepared(tmp_path)
    check_weights_fit(fits, 2 * 49152 * 4, 1)
    with pytest.raises(ValueError, match=r"would hold 384\.00 KiB, and it has 97\.66 KiB of"):
        check_weights_fit(fits, 100_000, 1)


def parameters_of(sizes: dict[str, int]) -> int:
    """Weights of a GPT-2 of these sizes with tied output weights, not padded."""
    h, layers = sizes["hidden_size"], sizes["num_layers"]
    return layers * (12 * h * h + 13 * h) + 2 * h + (sizes.get("vocab_size", 0) + sizes["max_position_embeddings"]) * h


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt2_124m", 124), ("gpt2_345m", 355), ("gpt2_774m", 774), ("gpt2_xl_1558m", 1558), ("gpt3_6.7b", 6658),
     ("gpt3_175b", 174_604), ("gpt2_tiny", 3)],
)  # fmt: skip
def test_shipped_models_have_the_size_of_their_name(name: str, millions: int) -> None:
    sizes = json.loads((ROOT / "configs" / "model" / f"{name}.json").read_text())
    assert round(parameters_of(sizes) / 1e6) == pytest.approx(millions, abs=1)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "deepspeed").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_deepspeed_configurations_are_what_their_names_say(path: Path) -> None:
    args = parse_arguments(["--deepspeed_config", str(path), *SIZES, *REST])
    run = complete_run(args, read_deepspeed_config(str(path)), None, world_size=1, on_gpu=True)
    check_run(run)
    assert path.stem == f"zero{run.deepspeed['zero_optimization']['stage']}_{run.precision}"
    taken = [name for name, operation in OPERATIONS.items() if not operation.is_opt_in]
    assert run.deepspeed["tempo"] == {"enabled": False, **dict.fromkeys(taken, "auto")}


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_every_argument_has_a_help_text(family: str) -> None:
    from tempo_megatron.training.run.arguments import build_parser

    assert [action.option_strings for action in build_parser(family)._actions if not action.help] == []


BOOLEANS = {
    "true": True,
    "yes": True,
    1: True,
    "1": True,
    "on": True,
    "false": False,
    0: False,
    "No": False,
}


@pytest.mark.parametrize(("value", "enabled"), BOOLEANS.items(), ids=repr)
def test_booleans_of_the_json_are_read_as_deepspeed_reads_them(tmp_path: Path, value: Any, enabled: bool) -> None:
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config

    config = {"bf16": {"enabled": value}, "zero_optimization": {"stage": 1}, "checkpoint": {"load_universal": "false"}}
    run = prepared(tmp_path, config=config)
    assert run.precision == ("bf16" if enabled else "fp32")
    assert run.deepspeed["bf16"]["enabled"] is enabled is DeepSpeedBF16Config(**config["bf16"]).enabled


NONSENSE = {
    "maybe": ({"bf16": {"enabled": "maybe"}}, "\"bf16.enabled\" is 'maybe'; expected true or false"),
    "two": ({"fp16": {"enabled": 2}}, '"fp16.enabled" is 2; expected true or false'),
    "no block": ({"bf16": True}, '"bf16" is True; expected an object {...}'),
    "null block": ({"zero_optimization": None}, '"zero_optimization" is None; expected an object {...}'),
    "stage in words": ({"zero_optimization": {"stage": "two"}}, "\"zero_optimization.stage\" is 'two'; expected 0"),
    "breakdown": ({"memory_breakdown": "perhaps"}, "\"memory_breakdown\" is 'perhaps'; expected true or false"),
    "negative clipping": ({"gradient_clipping": -1}, '"gradient_clipping" is -1; expected a number of at least 0'),
    "empty block": ({"zero_optimization": []}, '"zero_optimization" is []; expected an object {...}'),
    "block of DeepSpeed": ({"flops_profiler": "x"}, "\"flops_profiler\" is 'x'; expected an object {...}"),
    "capitals": ({"TEMPO": {}}, '"TEMPO" is unknown; the nearest known name is "tempo"'),
    "British": ({"optimiser": {}}, 'the nearest known name is "optimizer", which is not used here: the trainer builds'),
    "inner name": ({"zero_optimization": {"stge": 1}}, 'the nearest known name is "zero_optimization.stage"'),
    "offload": (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "gpu"}}},
        '"zero_optimization.offload_optimizer.device" is \'gpu\'; expected "none" or "cpu" or "nvme"',
    ),
    "infinite": ('{"gradient_clipping": 1e999}', "1e999 is beyond the numbers that there are"),
    "nothing": ("", "is not valid JSON (it is empty)"),
    "nested": ("[" * 5000, "is not valid JSON (it is nested too deeply)"),
    "universal": ({"checkpoint": {"load_universal": "yes"}}, '"checkpoint.load_universal" is not used here'),
}


@pytest.mark.parametrize(("config", "words"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense_in_the_json_is_one_sentence(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    assert words in refusal(tmp_path, config=config)


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_help_names_no_module_that_is_always_refused(family: str) -> None:
    from tempo_megatron.training.run.arguments import build_parser

    text = build_parser(family).format_help().replace("qk-layernorm", "").replace("--tempo-moe-permute", "")
    assert "{core_attn,mlp}" in text
    assert not any(module in text for module in ("moe", "shared_experts", "mla_up_proj", "layernorm"))


def test_the_learning_rate_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "deepspeed.json"
    path.write_text("{}")
    args = parse_arguments(["--deepspeed_config", str(path), *SIZES, *REST[:4], "--data-path", "text"])
    with pytest.raises(ValueError, match="--lr is missing; give the highest learning rate"):
        complete_run(args, read_deepspeed_config(str(path)), None, world_size=1, on_gpu=False)


def test_a_file_that_is_not_one_of_metrics_is_never_written_over(tmp_path: Path) -> None:
    novel = tmp_path / "novel.txt"
    for content in ("It was a dark and stormy night.\n", '{"text": "of mine"}\n', "[1]\n"):
        novel.write_text(content)
        with pytest.raises(ValueError, match="exists and does not hold metrics of a run; give another name"):
            prepared(tmp_path, "--metrics-file", str(novel))
        assert novel.read_text() == content
    novel.write_bytes(b"\x89PNG\xff\n")
    with pytest.raises(ValueError, match="is not a file of metrics"):
        prepared(tmp_path, "--metrics-file", str(novel))
