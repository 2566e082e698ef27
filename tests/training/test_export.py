"""Exported weights are those that were trained, from every layout, and transformers computes the same with them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_megatron_ranks
from imported_models import megatron_logits
from live_states import join, keep_states
from safetensors.torch import load_file
from training_job import ROOT, Call, Data, describe_anew, limit_file_size, run, successful

from tempo_megatron.cli import main
from tempo_megatron.models.huggingface.config import find_class
from tempo_megatron.models.huggingface.tensors import list_tensors
from tempo_megatron.models.shape import make_shape
from tempo_megatron.models.shape_file import read_shape_file

SP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
UNTIED = ["--untie-embeddings-and-output-weights"]


def config_of(stage: int, bf16: bool) -> dict[str, Any]:
    config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    return {**config, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}} if bf16 else config


# Of each optimizer of DeepSpeed's one, and tensor parallelism once: test_resharding.py reads the others' files.
CASES = {
    "one process, ZeRO 0": (1, 0, False, []),
    "TP 2 + SP, ZeRO 1, untied": (2, 1, False, [*SP, *UNTIED]),
    "DP 2, ZeRO 1, bf16": (2, 1, True, []),
    "DP 3, ZeRO 3": (3, 3, False, []),
}


@pytest.mark.parametrize(
    ("world_size", "stage", "bf16", "extra"),
    [pytest.param(*case, id=name, marks=() if case[0] == 1 else pytest.mark.slow) for name, case in CASES.items()],
)
def test_exported_weights_are_those_of_the_live_model(
    data: Data, tmp_path: Path, world_size: int, stage: int, bf16: bool, extra: list[str]
) -> None:
    # An odd hidden size leaves remainders for ZeRO's partitions.
    sizes = ["--hidden-size", "68", "--ffn-hidden-size", "130", "--train-iters", "2", "--save", str(tmp_path / "save")]
    layout: dict[str, Any] = {"world_size": world_size, "config": config_of(stage, bf16)}
    successful(run(data, tmp_path, *sizes, *extra, **layout, before=keep_states))
    dtype = "bf16" if bf16 else "fp32"
    output = tmp_path / "out" / "weights.safetensors"
    assert main(["export", "--load", str(tmp_path / "save"), "--output", str(output), "--dtype", dtype]) == 0
    exported, live = load_file(output), join(tmp_path / "saved2")
    assert {f"{name} weight" for name in exported} == {name for name in live if name.endswith(" weight")}
    for name, value in exported.items():
        assert value.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        assert torch.equal(value, live[f"{name} weight"].to(value.dtype)), name
    assert [path.name for path in output.parent.iterdir()] == [output.name]


@pytest.fixture(scope="module")
def saved(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, TP 2 and ZeRO 1, of a model whose vocabulary is padded."""
    folder = tmp_path_factory.mktemp("saved")
    padded = ["--make-vocab-size-divisible-by", "300", "--save", str(folder / "save"), "--save-interval", "1"]
    successful(run(data, folder, "--train-iters", "2", *SP, *UNTIED, *padded, world_size=2, config=config_of(1, False)))
    return folder / "save"


def export(load: Path, output: Path, *more: str) -> int:
    return main(["export", "--load", str(load), "--output", str(output), *more])


def test_an_earlier_step_is_chosen_by_its_number(saved: Path, tmp_path: Path) -> None:
    assert export(saved, tmp_path / "last.safetensors") == 0
    assert export(saved, tmp_path / "first.safetensors", "--iteration", "1") == 0
    first, last = load_file(tmp_path / "first.safetensors"), load_file(tmp_path / "last.safetensors")
    assert not torch.equal(first["output_layer.weight"], last["output_layer.weight"])


OPTIMIZER = "zero_pp_rank_0_mp_rank_01_optim_states.pt"


def flip_bit(checkpoint: Path) -> None:
    content = bytearray((checkpoint / OPTIMIZER).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / OPTIMIZER).write_bytes(content)


def intrude(checkpoint: Path) -> None:
    state = torch.load(checkpoint / OPTIMIZER, weights_only=False)
    torch.save({**state, "more": Call(os.mknod, str(checkpoint.parent / "executed"))}, checkpoint / OPTIMIZER)


def change_a_digit(checkpoint: Path) -> None:
    text = (checkpoint / "run.json").read_text()
    (checkpoint / "run.json").write_text(text.replace('"num_layers": 2', '"num_layers": 3'))


def write(content: str) -> Callable[[Path], object]:
    return lambda checkpoint: (checkpoint / "run.json").write_text(content)


def describe(**changes: Any) -> Callable[[Path], object]:
    return lambda checkpoint: describe_anew(checkpoint, **changes)


NO_TRAINERS = "is not a checkpoint of Tempo's trainer"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (
        lambda checkpoint: (checkpoint / OPTIMIZER).unlink(),
        f"iter_0000002 lacks {OPTIMIZER}; give --iteration of another checkpoint",
    ),
    "a bit": (flip_bit, f"{OPTIMIZER} is damaged: its content is not what was saved"),
    "a digit": (change_a_digit, "run.json is not what the trainer wrote: its checksum differs"),
    "code": (intrude, "holds posix.mknod where a checkpoint has only tensors and numbers; nothing of it was executed"),
    "a list": (write("[2]"), f"{NO_TRAINERS} (run.json holds a list, expected an object)"),
    "no class": (
        describe(activation="squared_relu"),
        "its activation is squared_relu, and that of the nearest one, GPT2LMHeadModel, is gelu",
    ),
    "another model": (
        describe(num_layers=3),
        "the model of run.json has decoder.layers.2.input_layernorm.weight, the checkpoint has not",
    ),
    "another width": (
        describe(ffn_hidden_size=512),
        "linear_fc1.weight has the shape [256, 64], expected [512, 64]; give a checkpoint",
    ),
}


@pytest.mark.parametrize(("damage", "said"), FAULTS.values(), ids=FAULTS)
def test_what_cannot_be_exported_is_one_sentence_and_leaves_nothing(
    saved: Path, tmp_path: Path, damage: Callable[[Path], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved, tmp_path / "save")
    damage(tmp_path / "save" / "iter_0000002")
    assert export(tmp_path / "save", tmp_path / "out" / "model.safetensors", "--format", "huggingface") == 2
    message = capsys.readouterr().err
    assert said in message and message.startswith("tempo-megatron export: ") and message.count("\n") == 1
    assert not (tmp_path / "out").exists() and not (tmp_path / "save" / "executed").exists()


def test_wrong_arguments_are_named(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there.safetensors"
    there.write_bytes(b"precious")
    for load, output, more, said in [
        (saved, "a.safetensors", ["--iteration", "7"], "holds no checkpoint of this step; give one of 1, 2"),
        (tmp_path, "a.safetensors", [], "holds no checkpoint; give a folder that the trainer saved to"),
        (saved / "iter_0000002", "a.safetensors", [], "is one checkpoint; give the folder around it"),
        (saved, "a.bin", [], "does not end in .safetensors"),
        (saved, "a.safetensors", ["--format", "huggingface"], "a/model.safetensors"),
        (saved, "there.safetensors", [], "would be overwritten"),
    ]:
        assert export(load, tmp_path / output, *more) == 2
        assert said in capsys.readouterr().err
    assert there.read_bytes() == b"precious"


def test_a_full_disk_leaves_no_file(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with limit_file_size(10_000):
        assert export(saved, tmp_path / "out" / "w.safetensors") == 2
    assert "w.safetensors cannot be written (File too large); free some space" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_transformers_computes_the_same_with_a_trained_model_and_its_tokenizer(data: Data, tmp_path: Path) -> None:
    """test_import.py has every class."""
    import transformers

    from tempo_megatron.data.tokenizer import GPT2Tokenizer

    # A rate at which no norm and no bias stays near what it was, and rows of padding in the vocabulary.
    words = ["--train-iters", "2", "--lr", "0.05", "--make-vocab-size-divisible-by", "300", *SP]
    successful(run(data, tmp_path, *words, "--save", str(tmp_path / "save"), world_size=2, config=config_of(2, False)))
    run_json = json.loads((tmp_path / "save" / "iter_0000002" / "run.json").read_text())
    assert export(tmp_path / "save", tmp_path / "megatron.safetensors") == 0
    assert export(tmp_path / "save", tmp_path / "hf" / "model.safetensors", "--format", "huggingface") == 0
    tokens = torch.randint(run_json["vocab_size"], (3, 64))
    weights = load_file(tmp_path / "megatron.safetensors")
    (expected,) = run_megatron_ranks(megatron_logits, 1, 1, run_json, weights, tokens)
    loaded, seen = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(seen[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        found = loaded.eval()(tokens).logits
    ours = expected[..., : run_json["vocab_size"]]
    assert found.shape == ours.shape and ours.std() > 0.05
    assert (found - ours).abs().max() <= 2e-5 * ours.abs().max()
    text = "def main():\n    return 'äöü 世界'\n"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer(text)["input_ids"] == GPT2Tokenizer(data.vocab_file, data.merge_file).tokenize(text)
    assert loaded.config.eos_token_id == run_json["end_of_document"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        (
            {"activation": "squared_relu"},
            "its activation is squared_relu, and that of the nearest one, GPT2LMHeadModel,",
        ),
        ({"position_embedding_type": "rope"}, "its position_embedding_type is rope, and that of the nearest one, GPT2"),
        ({"family": "bert", "gelu_form": "tanh"}, "its gelu_form is tanh, and that of the nearest one, MegatronBert"),
        ({"kv_channels": 32}, "its kv_channels is 32, and that of the nearest one, GPT2LMHeadModel, is 16; give"),
    ],
)
def test_a_model_without_a_class_is_one_sentence(changes: dict[str, Any], said: str | None) -> None:
    shape = make_shape(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=512)
    described = {**shape.describe(), "gelu_form": "erf", **changes}
    if said is None:
        assert find_class(described)[0] == "GPT2LMHeadModel"
    else:
        with pytest.raises(ValueError, match="no class of transformers that export knows") as refused:
            find_class(described)
        assert said in str(refused.value)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("mixtral_8x7b", None),
        ("qwen3_30b_a3b", None),
        ("deepseek_v3", "its multi_latent_attention is True, and that of the nearest one, .*, is False"),
        ("gpt_oss_20b", "its softmax_type is learnable, and that of the nearest one, .*, is vanilla"),
        ("t5_base", "transformers' T5 is another model: its scores are not scaled"),
    ],
)
def test_a_published_model_has_a_class_or_is_one_sentence(file: str, said: str | None) -> None:
    described = make_shape(**read_shape_file(ROOT / "configs" / "model" / f"{file}.json")).describe()
    described |= {"gelu_form": None, "padded_vocab_size": described["vocab_size"]}
    if said is None:
        tensors = list_tensors({**described, "num_layers": 1})
        # Norms, qkv, the output's projection, the router, embedding, final norm and head, and two of each expert.
        assert len(tensors) == 8 + 2 * described["qk_layernorm"] + 2 * described["num_experts"]
    else:
        with pytest.raises(ValueError, match=said):
            find_class(described)
