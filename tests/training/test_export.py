"""Exported weights are those that were trained, from every layout, and transformers computes the same with them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_megatron_ranks
from safetensors.torch import load_file
from training_job import Data, make_data, run, successful, write_unsealed

from tempo_megatron import TempoConfig
from tempo_megatron.cli import main
from tempo_megatron.training.checkpoint_files.weight_names import convert_to_gpt2, list_weight_shapes

SP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
UNTIED = ["--untie-embeddings-and-output-weights"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("data"))


def keep_live_weights() -> None:
    """Let a rank write the weights that its model has at a save beside the checkpoints."""
    import deepspeed

    from tempo_megatron.training.checkpoint import Checkpoints

    save = Checkpoints.save

    def save_both(self: Checkpoints, *args: Any, **kwargs: Any) -> bool:
        done = save(self, *args, **kwargs)
        module = self.engine.deepspeed.module
        with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=self.engine.zero_stage == 3):
            weights = {
                name: (
                    parameter.detach().clone(),
                    parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None,
                )
                for name, parameter in module.named_parameters()
            }
        torch.save(weights, Path(self.run.save).parent / f"live_{self.rank}.pt")
        return done

    Checkpoints.save = save_both  # type: ignore[method-assign]


def live_weights(folder: Path, tp: int) -> dict[str, torch.Tensor]:
    """The whole model from what keep_live_weights wrote on the first `tp` ranks, divided as its parameters say."""
    ranks = [torch.load(folder / f"live_{rank}.pt") for rank in range(tp)]
    whole = {}
    for name, (_, dimension) in ranks[0].items():
        parts = [rank[name][0] for rank in ranks]
        whole[name] = parts[0] if dimension is None else torch.cat(parts, dim=dimension)
    return whole


def config_of(stage: int, bf16: bool) -> dict[str, Any]:
    config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    return {**config, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}} if bf16 else config


CASES = {
    "one process, ZeRO 0": (1, 1, 0, False, []),
    "TP 2 + SP, ZeRO 0": (2, 2, 0, False, SP),
    "TP 2 + SP, ZeRO 1, untied": (2, 2, 1, False, [*SP, *UNTIED]),
    "TP 2 + SP, ZeRO 1, bf16": (2, 2, 1, True, SP),
    "DP 2, ZeRO 1, bf16": (2, 1, 1, True, []),
    "DP 2, ZeRO 2": (2, 1, 2, False, []),
    "DP 3, ZeRO 3": (3, 1, 3, False, []),
    "TP 2 + SP, DP 2, ZeRO 2": (4, 2, 2, False, SP),
    "TP 2 + SP, DP 2, ZeRO 3, bf16": (4, 2, 3, True, SP),
}
QUICK = ("one process, ZeRO 0",)


@pytest.mark.parametrize(
    ("world_size", "tp", "stage", "bf16", "extra"),
    [pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, case in CASES.items()],
)
def test_exported_weights_are_those_of_the_live_model(
    data: Data, tmp_path: Path, world_size: int, tp: int, stage: int, bf16: bool, extra: list[str]
) -> None:
    # An odd hidden size leaves remainders for ZeRO's partitions.
    sizes = ["--hidden-size", "68", "--ffn-hidden-size", "130", "--train-iters", "2", "--save", str(tmp_path / "save")]
    successful(
        run(
            data,
            tmp_path,
            *sizes,
            *extra,
            world_size=world_size,
            config=config_of(stage, bf16),
            before=keep_live_weights,
        )
    )
    dtype = "bf16" if bf16 else "fp32"
    output = tmp_path / "out" / "weights.safetensors"
    assert main(["export", "--load", str(tmp_path / "save"), "--output", str(output), "--dtype", dtype]) == 0
    exported, live = load_file(output), live_weights(tmp_path, tp)
    assert set(exported) == set(live)
    for name, value in live.items():
        assert exported[name].dtype == value.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        assert torch.equal(exported[name], value), name
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


def megatron_logits(run_json: dict[str, Any], weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """[b, s, padded vocabulary] of a stock GPTModel with these weights."""
    from tempo_megatron.models.build import build_model, build_transformer_config
    from tempo_megatron.models.shape import NAMES, make_shape

    shape = make_shape(**{name: run_json[name] for name in NAMES})
    config = build_transformer_config(shape)
    model = build_model(shape, config, TempoConfig.off(), run_json["padded_vocab_size"]).eval()
    left = model.load_state_dict(weights, strict=False)
    assert not left.unexpected_keys and all(name.endswith("_extra_state") for name in left.missing_keys)
    length = tokens.size(1)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model(tokens, torch.arange(length).expand_as(tokens), mask)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_the_same_logits(saved: Path, data: Data, tmp_path: Path, tied: bool) -> None:
    from transformers import GPT2LMHeadModel, GPT2Tokenizer

    run_json = json.loads((saved / "iter_0000002" / "run.json").read_text())
    assert run_json["vocab_size"] < run_json["padded_vocab_size"] == 600
    load = saved
    if tied:  # the same files, told to be of a tied model: the output layer is then the embedding
        load = tmp_path / "tied"
        shutil.copytree(saved, load)
        for path in (load / "iter_0000002").glob("*mp_rank_0*_states.pt"):
            drop_output_layer(path)
        run_json["untie_embeddings_and_output_weights"] = False
        write_unsealed(load / "iter_0000002", untie_embeddings_and_output_weights=False)
    assert export(load, tmp_path / "megatron.safetensors") == 0
    assert export(load, tmp_path / "gpt2" / "model.safetensors", "--format", "huggingface") == 0
    tokens = torch.randint(run_json["vocab_size"], (3, 64))
    weights = load_file(tmp_path / "megatron.safetensors")
    (expected,) = run_megatron_ranks(
        megatron_logits, 1, 1, {**run_json, "tensor_model_parallel_size": 1}, weights, tokens
    )
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2").eval()
    with torch.no_grad():
        found = model(tokens).logits
    assert found.shape[-1] == run_json["vocab_size"]
    expected = expected[..., : run_json["vocab_size"]]
    assert expected.std() > 0.05
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    tokenizer = GPT2Tokenizer.from_pretrained(tmp_path / "gpt2")
    text = "def main():\n    return 'äöü 世界'\n"
    from tempo_megatron.data.tokenizer import GPT2Tokenizer as Ours

    assert tokenizer(text)["input_ids"] == Ours.load(data.vocab_file, data.merge_file).tokenize(text)
    assert tokenizer.eos_token_id == model.config.eos_token_id == run_json["end_of_document"]


def drop_output_layer(path: Path) -> None:
    """Take output_layer.weight, the last of its parameter group, out of a checkpoint's file."""
    content = torch.load(path, weights_only=False)
    if "param_shapes" in content:
        content["param_shapes"][0].pop("output_layer.weight")
    else:
        groups = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        groups[0] = groups[0][: groups[0].numel() - 300 * 64]
        for paddings in content["optimizer_state_dict"].get("param_alignment_paddings", [])[:1]:
            paddings.pop()
    torch.save(content, path)
    write_unsealed(path.parent)


def test_an_earlier_step_is_chosen_by_its_number(saved: Path, tmp_path: Path) -> None:
    assert export(saved, tmp_path / "last.safetensors") == 0
    assert export(saved, tmp_path / "first.safetensors", "--iteration", "1") == 0
    first, last = load_file(tmp_path / "first.safetensors"), load_file(tmp_path / "last.safetensors")
    assert not torch.equal(first["output_layer.weight"], last["output_layer.weight"])


def damage(folder: Path, how: str) -> None:
    checkpoint = folder / "iter_0000002"
    optimizer = checkpoint / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    run_json = checkpoint / "run.json"
    if how == "missing":
        optimizer.unlink()
    elif how == "cut off":
        optimizer.write_bytes(optimizer.read_bytes()[: optimizer.stat().st_size // 2])
    elif how == "code":
        state = torch.load(optimizer, weights_only=False)
        torch.save({**state, "more": RunsCode(folder / "executed")}, optimizer)
    elif how == "a bit":
        content = bytearray(optimizer.read_bytes())
        content[len(content) // 2] ^= 1
        optimizer.write_bytes(content)
    elif how == "a digit":
        run_json.write_text(run_json.read_text().replace('"num_layers": 2', '"num_layers": 3'))
    elif how == "a list":
        run_json.write_text("[2]")
    elif how == "BERT":
        run_json.write_text(json.dumps({"model": "bert", "layers": 2}))
    elif how == "another model":
        write_unsealed(checkpoint, num_layers=3)
    elif how == "Llama":
        write_unsealed(checkpoint, activation="swiglu")
    elif how == "another width":
        write_unsealed(checkpoint, ffn_hidden_size=512)
    else:
        write_unsealed(checkpoint, vocab_size=None)


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "missing",
            "iter_0000002 lacks zero_pp_rank_0_mp_rank_01_optim_states.pt; give --iteration of another checkpoint",
        ),
        ("a bit", "zero_pp_rank_0_mp_rank_01_optim_states.pt is damaged: its content is not what was saved"),
        ("a digit", "run.json is not what the trainer wrote: its checksum differs"),
        ("cut off", "zero_pp_rank_0_mp_rank_01_optim_states.pt is damaged"),
        ("code", "holds posix.mkdir where a checkpoint has only tensors and numbers; nothing of it was executed"),
        ("a list", "is not a checkpoint of tempo-pretrain-gpt (run.json holds a list, expected an object)"),
        ("BERT", "is not a checkpoint of tempo-pretrain-gpt, whose run.json describes a GPT"),
        ("Llama", "its activation is swiglu, but what can be exported is a GPT-2, whose activation is gelu"),
        ("another model", "the model has decoder.layers.2.input_layernorm.bias, the checkpoint"),
        ("another width", "has the shape [256, 64], expected [512, 64] after run.json"),
        ("old", "run.json does not say vocab_size: it is of an older version"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence_and_leaves_nothing(
    saved: Path, tmp_path: Path, how: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved, tmp_path / "save")
    damage(tmp_path / "save", how)
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


def test_a_full_disk_leaves_no_file(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import safetensors.torch

    def fail(weights: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise safetensors.SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    assert export(saved, tmp_path / "out" / "w.safetensors") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_gpt2_has_every_weight_under_another_name() -> None:
    sizes = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 32, "num_attention_heads": 2, "vocab_size": 5}
    run_json = {**sizes, "padded_vocab_size": 5, "max_position_embeddings": 4}
    run_json["untie_embeddings_and_output_weights"] = True
    weights = {name: torch.randn(shape) for name, shape in list_weight_shapes(run_json).items()}
    renamed = convert_to_gpt2(weights, run_json)
    assert len(renamed) == len(weights)
    assert sum(value.sum() for value in renamed.values()) == pytest.approx(sum(v.sum() for v in weights.values()))
