"""What a resumed run takes from its command line and what from its checkpoint, and what data it accepts."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import run_configs
from run_configs import NEEDED, SIZES
from training_job import BF16, Data, Run, describe_anew, run, successful, zero

from tempo_megatron.models.shape import NAMES
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.training.checkpoint import check_same_run, describe_run
from tempo_megatron.training.checkpoint_files.folder import write_description
from tempo_megatron.training.config_command import describe_settings
from tempo_megatron.training.run.arguments import parse_arguments
from tempo_megatron.training.run.option import OnLoad
from tempo_megatron.training.run.resume import (
    MODEL_MAY_CHANGE,
    TAKEN,
    describe_changes,
    read_saved_run,
)
from tempo_megatron.training.run.run_config import OPTIONS, RunConfig
from tempo_megatron.training.tasks.task import Vocabulary

# The optimizer of ZeRO 2 has the class of that of ZeRO 1.
STAGES = {**{f"ZeRO {stage}": zero(stage) for stage in (0, 1, 3)}, "ZeRO 1, bf16": {**zero(1), **BF16}}
ZERO1 = zero(1)
STEPS = 6


SETTINGS = [
    *("--adam-beta1", "0.8", "--adam-beta2", "0.9", "--adam-eps", "1e-6", "--weight-decay", "0.1"),
    *("--hidden-dropout", "0", "--use-tempo", "--tempo-attention", "off", "--eod-mask-loss"),
    *("--clip-grad", "0.5", "--lr-decay-style", "cosine", "--min-lr", "1e-5"),
]


def resume(data: Data, folder: Path, saved: Path, *options: str, config: dict[str, Any] = ZERO1) -> Run:
    return run(data, folder, "--train-iters", str(STEPS), "--load", str(saved), *options, config=config)


def in_force(result: Run) -> dict[str, Any]:
    return successful(result).of_kind("run")[-1]["settings"]


Stopped = Callable[[str], tuple[Path, Run]]


@pytest.fixture(scope="module")
def stopped(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """The checkpoint of a run of 6 steps with SETTINGS, stopped after 3, and the run that went on from it."""
    found: dict[str, tuple[Path, Run]] = {}

    def get(name: str) -> tuple[Path, Run]:
        if name not in found:
            folder = tmp_path_factory.mktemp("stopped")
            steps = ["--train-iters", str(STEPS), "--exit-interval", "3", "--save", str(folder / "save")]
            successful(run(data, folder, *SETTINGS, *steps, config=STAGES[name]))
            rest = resume(data, folder / "rest", folder / "save", config=STAGES[name])
            found[name] = folder / "save", successful(rest)
        return found[name]

    return get


@pytest.fixture
def saved(stopped: Stopped) -> Path:
    return stopped("ZeRO 1")[0]


@pytest.fixture
def as_before(stopped: Stopped) -> Run:
    return stopped("ZeRO 1")[1]


KEPT = {"adam_betas": [0.8, 0.9], "adam_eps": 1e-6, "weight_decay": 0.1, "clip_grad": 0.5}


def test_what_is_left_out_is_as_in_the_checkpoint(data: Data, as_before: Run, tmp_path: Path) -> None:
    result = as_before
    assert in_force(result) == KEPT
    rates = [record["learning_rate"] for record in result.of_kind("train")]
    whole = run(data, tmp_path, *SETTINGS, "--train-iters", str(STEPS), config=ZERO1)
    assert rates == [record["learning_rate"] for record in whole.of_kind("train")][3:]
    assert result.losses_hex == successful(whole).losses_hex[3:]
    assert "betas 0.8 0.9, eps 1e-06, weight decay 0.1, clipping 0.5" in result.output
    assert "then cosine to 1e-05 at step 6" in result.output


TYPED = "--adam-beta1 0.5 --adam-beta2 0.5 --adam-eps 1e-2 --weight-decay 3 --clip-grad 0.01".split()
CHANGED = {"adam_betas": [0.5, 0.5], "adam_eps": 1e-2, "weight_decay": 3.0, "clip_grad": 0.01}


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_what_is_typed_takes_effect(data: Data, stopped: Stopped, tmp_path: Path, name: str) -> None:
    save, as_before = stopped(name)
    result = resume(data, tmp_path, save, *TYPED, config=STAGES[name])
    assert in_force(result) == CHANGED
    assert result.losses_hex[0] == as_before.losses_hex[0]  # before the first update with it
    assert all(ours != theirs for ours, theirs in zip(result.losses_hex[1:], as_before.losses_hex[1:], strict=True))


def test_a_run_is_extended_with_a_schedule_of_its_own(data: Data, saved: Path, tmp_path: Path) -> None:
    longer = ["--train-iters", "8", "--lr-decay-iters", "8", "--override-opt-param-scheduler"]
    steps = successful(resume(data, tmp_path, saved, *longer)).of_kind("train")
    assert [step["iteration"] for step in steps] == [4, 5, 6, 7, 8]
    rates = [step["learning_rate"] for step in steps]
    assert rates == pytest.approx([6.25e-4, 5e-4, 3.75e-4, 2.5e-4, 1.25e-4])


@pytest.mark.slow
def test_an_extended_run_keeps_the_order_of_its_samples(data: Data, tmp_path: Path) -> None:
    """One document of a few hundred samples: a run that was begun for one epoch goes on for several."""
    constant = "--split 1,11 --lr-decay-style constant --global-batch-size 16 --micro-batch-size 16".split()
    planned = successful(run(data, tmp_path / "planned", *constant, "--train-iters", "6"))
    save = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    successful(run(data, tmp_path / "parts", *constant, "--train-iters", "6", "--exit-interval", "2", *save))
    options = [*constant, *save, "--train-iters", "200"]
    longer = successful(run(data, tmp_path / "parts", *options, "--exit-interval", "6"))
    assert longer.losses_hex == planned.losses_hex  # Megatron's order depends on the number of epochs
    parts = json.loads((tmp_path / "save" / "iter_0000006" / "run.json").read_text())["sample_parts"]
    assert parts[0] == 96 and len(parts) == 2


def copied(data: Data, folder: Path) -> Data:
    folder.mkdir()
    for path in Path(data.prefix).parent.glob("*.*"):
        shutil.copy(path, folder)
    return Data(str(folder / "text"), str(folder / "vocab.json"), str(folder / "merges.txt"))


def test_a_data_set_that_was_moved_is_the_same(data: Data, saved: Path, as_before: Run, tmp_path: Path) -> None:
    moved = resume(copied(data, tmp_path / "moved"), tmp_path, saved)
    assert successful(moved).losses_hex == as_before.losses_hex


def change_a_token(data: Data) -> None:
    tokens = np.fromfile(data.prefix + ".bin", np.uint16)
    tokens[len(tokens) // 2] ^= 1
    tokens.tofile(data.prefix + ".bin")


def swap_two_words(data: Data) -> None:
    vocab = json.loads(Path(data.vocab_file).read_text())
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    Path(data.vocab_file).write_text(json.dumps(vocab))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (change_a_token, "was trained on {0}, and {1} has another content; change --data-path"),
        (swap_two_words, "has another tokenizer; change --vocab-file and --merge-file"),
    ],
)
def test_other_data_of_the_same_sizes_is_refused(
    data: Data, saved: Path, tmp_path: Path, change: Callable[[Data], None], sentence: str
) -> None:
    other = copied(data, tmp_path / "other")
    change(other)
    result = resume(other, tmp_path, saved)
    assert result.exit_codes == [1] and "Traceback" not in result.output
    assert sentence.format(data.prefix, other.prefix) in result.output


TEMPO_BLOCK = {"enabled": False, "norm": "auto"}
# Every field that a run takes from its checkpoint, with another value than its default. BERT has no --eod-mask-loss.
SAID = {
    "gpt": "--hidden-dropout 0 --attention-dropout 0.2 --swiglu --group-query-attention --num-query-groups 2 "
    "--normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope --rotary-base 500 --rotary-percent 0.5 "
    "--use-rope-scaling --rope-scaling-factor 4 --qk-layernorm --window-size 8,0 --disable-bias-linear --add-qkv-bias "
    "--untie-embeddings-and-output-weights --init-method-std 0.06 --kv-channels 32 --ffn-hidden-size 100 "
    "--max-position-embeddings 128 --vocab-size 512 --make-vocab-size-divisible-by 64 --global-batch-size 8 --seed 7 "
    "--rampup-batch-size 4 2 16 "
    "--min-lr 1e-5 --lr-warmup-iters 2 --lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-wsd-decay-style linear "
    "--lr-decay-iters 9 --weight-decay 0.1 --adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-6 --clip-grad 0.5 "
    "--split 8,2,2 --test-iters 1 --vocab-file v --merge-file m --eod-mask-loss "
    "--eval-interval 5 --eval-iters 3 --recompute-granularity full --recompute-method block --recompute-num-layers 2 "
    "--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion --bf16 "
    "--use-tempo --tempo-norm recompute --tempo-memory-budget 3GiB --tempo-host-memory 2GiB",
    "bert": "--mask-prob 0.3 --short-seq-prob 0.2 --masking tokens --bert-no-binary-head --recompute-granularity "
    "selective --recompute-modules mlp --use-tempo --tempo-loss off "
    '--tempo-layers {"0":{"norm":"off"}}',
    "gpt, experts": "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type yarn "
    "--rotary-scaling-factor 8 --original-max-position-embeddings 32 --beta-fast 16 --beta-slow 2 --mscale 0.7 "
    "--mscale-all-dim 0.7 --no-yarn-correction-range-round-to-int --multi-latent-attention --q-lora-rank 16 "
    "--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --num-experts 4 --moe-layer-freq [0,1] "
    "--moe-router-topk 1 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16 "
    "--moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-num-groups 2 "
    "--moe-router-group-topk 1 --moe-router-topk-scaling-factor 2 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1 --moe-router-dtype fp32 --use-tempo",
    "gpt, clamped": "--quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1 --softmax-type learnable "
    "--window-size 8,0 --window-attn-skip-freq 2 --position-embedding-type rope --use-tempo",
}
# Whose value in a first run cannot be another one than the default's, or that no argument gives.
WITHOUT_ANOTHER = {"sample_parts", "vocab_padding_tp"}


def decide(
    folder: Path, words: list[str], family: str = "gpt", config: dict[str, Any] | None = None, world_size: int = 1
) -> RunConfig:
    given = config or {**ZERO1, "bf16": {"enabled": "auto"}, "tempo": TEMPO_BLOCK}
    return run_configs.decide(
        folder, *words, config=given, family=family.partition(",")[0], world_size=world_size, on_gpu=True
    )


def describe(run: RunConfig, rows: int = 512) -> dict[str, Any]:
    return describe_run(run, Vocabulary(Tokenizer(), 512, rows, {}), zero_stage=1, gelu_form=None)


def pretend_to_save(run: RunConfig, folder: Path, iteration: int = 6, **changes: Any) -> list[str]:
    """A checkpoint of `run` without its tensors; the words that load it."""
    checkpoint = folder / f"iter_{iteration:07d}"
    checkpoint.mkdir(parents=True)
    content = {
        **describe(run),
        "iteration": iteration,
        "settings": dataclasses.asdict(run),
        "sample_parts": [80],
        **changes,
    }
    write_description(checkpoint, {name: value for name, value in content.items() if value is not None}, {})
    (folder / "latest").write_text(checkpoint.name)
    return ["--load", str(folder)]


def read_saved(load: list[str], family: str = "gpt") -> dict[str, Any]:
    saved = read_saved_run(parse_arguments(["--deepspeed_config", "-", *load], family.partition(",")[0]))
    assert saved is not None
    return saved


class Tokenizer:
    eod = 0
    unique_identifiers = MappingProxyType({"class": "GPT2Tokenizer"})


def test_every_field_of_a_run_says_what_a_resumed_run_does_with_it() -> None:
    assert all(option.help and isinstance(option.on_load, OnLoad) for option in OPTIONS.values())
    assert set(MODEL_MAY_CHANGE) < set(NAMES)


def test_every_field_that_is_left_out_is_as_in_the_checkpoint(tmp_path: Path) -> None:
    runs, plain = {}, {}
    for family, words in SAID.items():
        runs[family] = run = decide(tmp_path, [*SIZES, *NEEDED, *words.split()], family)
        plain[family] = decide(tmp_path, [*SIZES, *NEEDED], family)
        load = pretend_to_save(run, tmp_path / family)
        resumed = decide(tmp_path, load, family)
        for name in set(TAKEN) - {"sample_parts"}:
            assert getattr(resumed, name) == getattr(run, name), name
        assert resumed.sample_parts == (80,)
        assert list(describe_changes(read_saved(load, family), dataclasses.asdict(resumed))) == []
    # None was its default in all of them.
    needed = {"micro_batch_size", "train_iters", "lr", "data_path"}
    for name in set(TAKEN) - WITHOUT_ANOTHER - needed - {"model"}:
        assert any(getattr(runs[family], name) != getattr(plain[family], name) for family in SAID), name
    sizes = {"num_layers", "hidden_size", "num_attention_heads", "seq_length"}
    refused = {"moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_router_enable_expert_bias"}
    for name in set(NAMES) - sizes - refused - {"family", "decoder_seq_length"}:
        assert any(getattr(runs[family].model, name) != getattr(plain[family].model, name) for family in SAID), name


def test_what_is_typed_or_new_in_the_json_holds(tmp_path: Path) -> None:
    run = decide(tmp_path, [*SIZES, *NEEDED, "--use-tempo", "--tempo-norm", "off", "--hidden-dropout", "0"])
    load = pretend_to_save(run, tmp_path / "save")
    assert decide(tmp_path, [*load, "--hidden-dropout", "0.3"]).model.hidden_dropout == 0.3
    assert decide(tmp_path, load, config={**ZERO1, "gradient_clipping": 0.02}).clip_grad == 0.02
    assert decide(tmp_path, [*load, "--no-use-tempo"]).tempo.is_off
    assert decide(tmp_path, load).tempo == TempoConfig(norm="off")
    assert decide(tmp_path, [*load, "--tempo-loss", "off"]).tempo == TempoConfig(norm="off", loss="off")
    new = {"tempo": {**TEMPO_BLOCK, "attention": "off"}}
    assert decide(tmp_path, load, "gpt", new).tempo == TempoConfig(norm="off", attention="off")
    stock = pretend_to_save(decide(tmp_path, [*SIZES, *NEEDED]), tmp_path / "stock")
    assert decide(tmp_path, stock).tempo.is_off
    assert decide(tmp_path, stock, "gpt", {"tempo": {"enabled": True, "norm": "off"}}).tempo == TempoConfig(norm="off")
    assert decide(tmp_path, [*stock, "--use-tempo"]).tempo == TempoConfig()
    full = [*SIZES, *NEEDED, "--recompute-granularity", "full", "--recompute-method", "block"]
    full = pretend_to_save(decide(tmp_path, full), tmp_path / "full")
    assert decide(tmp_path, [*full, "--recompute-granularity", "none"]).recompute_method is None
    assert decide(tmp_path, [*full, "--recompute-num-layers", "2"]).recompute_num_layers == 2


OTHERS = {
    "hidden size": (["--hidden-size", "128"], "its hidden_size is 64, this run's is 128, so it cannot be loaded"),
    "activation": (["--swiglu"], "its activation is gelu, this run's is swiglu"),
    "epsilon": (["--norm-epsilon", "1e-6"], "its norm_epsilon is 1e-05, this run's is 1e-06"),
    "rotary base": (["--rotary-base", "5000"], "its rotary_base is 10000, this run's is 5000"),
    "window": (["--window-size", "8,0"], "its window_size is None, this run's is [8, 0]"),
    "fewer steps": (["--train-iters", "3"], "--train-iters 3 is less than the 6 steps of"),
    "--lr": (["--lr", "2e-3"], "--lr is 0.002, but the schedule of"),
    "--min-lr": (["--min-lr", "1e-4"], "--min-lr is 0.0001, but the schedule of"),
    "--lr-decay-style": (["--lr-decay-style", "linear"], "has cosine; leave --lr-decay-style out, or take this run's"),
    "--lr-decay-iters": (["--lr-decay-iters", "9"], "has 10; leave --lr-decay-iters out"),
    "--lr-warmup-iters": (["--lr-warmup-iters", "1"], "has 0; leave --lr-warmup-iters out"),
}


@pytest.mark.parametrize(("words", "sentence"), OTHERS.values(), ids=OTHERS)
def test_what_a_run_cannot_go_on_with_is_refused_before_it_starts(
    tmp_path: Path, words: list[str], sentence: str
) -> None:
    run = decide(tmp_path, [*SIZES, *NEEDED, "--lr-decay-style", "cosine", "--min-lr", "1e-5"])
    load = pretend_to_save(run, tmp_path / "save")
    with pytest.raises(ValueError, match=re.escape(sentence)):
        decide(tmp_path, [*load, *words])


# Family, words, rows of the vocabulary: what shows when a run is built, before it reads the checkpoint's tensors.
OTHER_DESCRIPTIONS = {
    "vocabulary": ("gpt", "", 640, "its padded_vocab_size is 512, this run's is 640"),
    "precision": ("gpt", "--bf16", 512, "its precision is fp32, this run's is bf16"),
    "batch": ("gpt", "--global-batch-size 6", 512, "its global_batch_size is 2, this run's is 6, so the order"),
    "ramp": ("gpt", "--micro-batch-size 1 --rampup-batch-size 1 1 8", 512, "; leave out --rampup-batch-size"),
    "seed": ("gpt", "--seed 1", 512, "change --seed"),
    "masks": ("bert", "--mask-prob 0.2", 512, "its masking is {'mask_prob': 0.15"),
}


@pytest.mark.parametrize(("family", "words", "rows", "sentence"), OTHER_DESCRIPTIONS.values(), ids=OTHER_DESCRIPTIONS)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, family: str, words: str, rows: int, sentence: str
) -> None:
    load = pretend_to_save(decide(tmp_path, [*SIZES, *NEEDED], family), tmp_path / "save")
    other = decide(tmp_path, [*load, *words.split()], family)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check_same_run(read_saved(load, family), describe(other, rows), "save")


def test_a_checkpoint_of_another_format_and_a_folder_without_one_are_refused(tmp_path: Path) -> None:
    load = pretend_to_save(decide(tmp_path, [*SIZES, *NEEDED]), tmp_path / "save")
    describe_anew(tmp_path / "save" / "iter_0000006", format=1)
    with pytest.raises(ValueError, match="run.json has format 1, expected 4"):
        read_saved(load)
    with pytest.raises(ValueError, match="holds no checkpoint; give a folder with one, or leave --load out"):
        read_saved(["--load", str(tmp_path / "nothing")])


def test_the_global_batch_and_the_schedule_stay_when_they_were_left_out(tmp_path: Path) -> None:
    """The batch was 2 micro batches of 2; two processes now take one each, and three cannot share it."""
    config = {"gradient_accumulation_steps": 2, **ZERO1}
    run = decide(tmp_path, [*SIZES, *NEEDED], config=config)
    load = pretend_to_save(run, tmp_path / "save")
    resumed = decide(tmp_path, load, world_size=2)
    assert (run.global_batch_size, resumed.global_batch_size, resumed.num_micro_batches) == (4, 4, 1)
    with pytest.raises(ValueError, match="--global-batch-size 4 is not a multiple of micro batch size 2 x data par"):
        decide(tmp_path, load, world_size=3)
    beyond = "--train-iters 20 goes beyond the 10 steps of the checkpoint's schedule, .* give --lr-decay-iters 20 with"
    with pytest.raises(ValueError, match=beyond):
        decide(tmp_path, [*load, "--train-iters", "20"])


def test_config_show_names_the_checkpoint(tmp_path: Path) -> None:
    run = decide(tmp_path, [*SIZES, *NEEDED, "--use-tempo", "--tempo-norm", "off", "--hidden-dropout", "0"])
    load = pretend_to_save(run, tmp_path / "save")
    argv = ["--deepspeed_config", str(tmp_path / "deepspeed.json"), *load, "--seed", "1234", "--tempo-loss", "off"]
    rows = {name: (value, source) for name, value, source in describe_settings(argv, "gpt", 1)}
    checkpoint = "checkpoint iter_0000006"
    assert rows["model.hidden_dropout"] == ("0.0", checkpoint) and rows["tempo.norm"] == ("off", checkpoint)
    assert rows["data_path"] == ("text", checkpoint) and rows["seed"] == ("1234", "argument --seed")
    assert rows["tempo.loss"] == ("off", "argument --tempo-loss") and rows["log_interval"] == ("10", "default")


def test_changes_are_said(tmp_path: Path) -> None:
    load = pretend_to_save(decide(tmp_path, [*SIZES, *NEEDED]), tmp_path / "save")
    config = {"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}}
    resumed = decide(tmp_path, [*load, "--hidden-dropout", "0", "--eod-mask-loss"], "gpt", config)
    (line,) = describe_changes(read_saved(load), dataclasses.asdict(resumed))
    changes = line.removeprefix("other than in iter_0000006: ").split(", ")
    assert {"model.hidden_dropout 0.1 -> 0.0", "eod_mask_loss False -> True"} < set(changes)
    assert {"deepspeed.zero_optimization.stage 1 -> 2", "deepspeed.data_types.grad_accum_dtype none -> fp32"} < set(
        changes
    )
