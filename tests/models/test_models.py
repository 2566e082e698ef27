"""What a model is: files and arguments become one shape, and contradictions one sentence."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tempo_megatron.models.arguments import add_model_arguments, read_given_model
from tempo_megatron.models.layout import Layout, check_layout, pad_vocab_size
from tempo_megatron.models.shape import ModelShape, make_shape
from tempo_megatron.models.shape_file import complete_description

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
TYPED = [word for name, size in SIZES.items() for word in ("--" + name.replace("_", "-"), str(size))]
EXPERTS = ["--num-experts", "4"]
LATENT = "--multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8".split()
ROPE = ["--position-embedding-type", "rope"]


def taken(*words: str, families: tuple[str, ...] = ("gpt",)) -> ModelShape:
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    return make_shape(**read_given_model(parser.parse_args([*TYPED, *words]), *families))


def file(folder: Path, **values: Any) -> str:
    path = folder / "model.json"
    path.write_text(json.dumps(values))
    return str(path)


def test_without_anything_else_a_model_is_a_gpt2() -> None:
    shape = taken()
    assert shape == make_shape(**SIZES)
    assert (shape.family, shape.ffn_hidden_size, shape.num_query_groups, shape.kv_channels) == ("gpt", 256, 4, 16)
    assert (shape.max_position_embeddings, shape.normalization, shape.activation) == (32, "LayerNorm", "gelu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        shape.num_layers = 3  # type: ignore[misc]


def test_a_gated_mlp_has_megatrons_width() -> None:
    # int((4 * 64 * 2 / 3) / 64) * 64
    assert taken("--swiglu").ffn_hidden_size == taken("--geglu").ffn_hidden_size == 128
    assert taken("--squared-relu").ffn_hidden_size == 256
    assert make_shape(**{**SIZES, "hidden_size": 4096, "activation": "swiglu"}).ffn_hidden_size == 10880


def test_every_argument_becomes_a_field() -> None:
    words = [*ROPE, "--swiglu", "--normalization", "RMSNorm", "--norm-epsilon", "1e-6", "--group-query-attention"]
    words += ["--num-query-groups", "2", "--kv-channels", "32", "--rotary-base", "500000", "--rotary-percent", "0.5"]
    words += ["--use-rope-scaling", "--rope-scaling-factor", "32", "--qk-layernorm", "--disable-bias-linear"]
    words += ["--untie-embeddings-and-output-weights", "--add-qkv-bias", "--window-size", "(16,0)"]
    assert taken(*words) == make_shape(
        **SIZES, position_embedding_type="rope", activation="swiglu", normalization="RMSNorm", norm_epsilon=1e-6,
        num_query_groups=2, kv_channels=32, rotary_base=500000, rotary_percent=0.5, use_rope_scaling=True,
        rope_scaling_factor=32.0, qk_layernorm=True, add_bias_linear=False, add_qkv_bias=True,
        untie_embeddings_and_output_weights=True, window_size=(16, 0),
    )  # fmt: skip


def test_a_typed_argument_wins_over_the_file(tmp_path: Path) -> None:
    model = ["--model", file(tmp_path, activation="swiglu", num_query_groups=2, add_bias_linear=False, num_layers=7)]
    wanted = {**SIZES, "activation": "swiglu", "num_query_groups": 2, "add_bias_linear": False}
    assert taken(*model) == make_shape(**wanted)
    assert taken(*model, "--no-swiglu", "--no-group-query-attention", "--no-disable-bias-linear") == make_shape(**SIZES)
    assert taken(*model, "--squared-relu").activation == "squared_relu"
    assert taken(*model, "--num-query-groups", "1").num_query_groups == 1
    assert taken("--group-query-attention").num_query_groups == 1  # Megatron-LM's default


WRONG_ARGUMENTS = {
    "two activations": (["--swiglu", "--geglu"], "--swiglu and --geglu are both given"),
    "groups alone": (["--num-query-groups", "2"], "--num-query-groups 2 is given without --group-query-attention"),
    "groups and none": (["--num-query-groups", "2", "--no-group-query-attention"], "are both given"),
    "heads and groups": (
        ["--group-query-attention", "--num-query-groups", "3"],
        "4 is not a multiple of --num-q",
    ),
    "rope's base": (["--rotary-base", "5000"], "--rotary-base 5000 is given without --position-embedding-type rope"),
    "rope's share": (["--rotary-percent", "0.5"], "--rotary-percent 0.5 is given without --position"),
    "rope's scaling": (["--use-rope-scaling"], "--use-rope-scaling is given without --position"),
    "a factor alone": ([*ROPE, "--rope-scaling-factor", "4"], "is given without --use-rope-scaling"),
    "odd rotation": ([*ROPE, "--rotary-percent", "0.2"], "rope would rotate 3 of 16 channels"),
    "both biases": (["--add-qkv-bias"], "--add-qkv-bias is given, but every linear has a bias"),
    "the future": (["--window-size", "8,1"], "lets a token see 1 of those after it"),
    "no window": (["--window-size", "-1,0"], "is no window"),
    "heads": (["--hidden-size", "66"], "--hidden-size 66 is not a multiple of --num-attention-heads 4"),
    "Yarn's factor": ([*ROPE, "--rotary-scaling-factor", "4"], "is given without --position-embedding-type yarn"),
    "experts' sizes": (["--moe-ffn-hidden-size", "8"], "--moe-ffn-hidden-size 8 is given without --num-experts"),
    "too many experts": ([*EXPERTS, "--moe-router-topk", "5"], "--moe-router-topk 5 is more than --num-experts 4"),
    "one expert": ([*EXPERTS, "--moe-router-topk", "1"], "add --moe-router-pre-softmax"),
    "a bias": ([*EXPERTS, "--moe-router-enable-expert-bias"], "needs --moe-router-score-function sigmoid"),
    "groups of experts": ([*EXPERTS, "--moe-router-num-groups", "2"], "are needed together"),
    "divided groups": (
        [*EXPERTS, "--moe-router-num-groups", "3", "--moe-router-group-topk", "1"],
        "do not divide --moe-router-topk 2 and --num-experts 4",
    ),
    "no layer": ([*EXPERTS, "--moe-layer-freq", "[0]*2"], "gives no layer experts"),
    "three layers": ([*EXPERTS, "--moe-layer-freq", "[0,1,1]"], "names 3 layers, and there are 2"),
    "latent sizes": ([*ROPE, "--multi-latent-attention"], "is given without --kv-lora-rank"),
    "a latent size": (["--v-head-dim", "8"], "--v-head-dim 8 is given without --multi-latent-attention"),
    "latent groups": ([*ROPE, *LATENT, "--group-query-attention"], "which has no such thing"),
    "latent positions": (LATENT, "--position-embedding-type is learned_absolute with --multi-latent-attention"),
    "a clamp": (["--activation-func-clamp-value", "7"], "is given without --quick-geglu"),
    "a window's layers": (["--window-attn-skip-freq", "2"], "is given without --window-size"),
    "positions": (["--max-position-embeddings", "8"], "--seq-length 32 is more than the 8 learned positions"),
}


@pytest.mark.parametrize(("words", "sentence"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_contradictions_are_one_sentence(words: list[str], sentence: str) -> None:
    words = [f"--window-size={words[1]}"] if words[0] == "--window-size" else words
    with pytest.raises(ValueError) as caught:
        taken(*words)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


WRONG_FILES = {
    "misspelt": ({"normalisation": "RMSNorm"}, "normalisation is unknown; the nearest known name is normalization"),
    "a number": ({"num_layers": 2.5}, "num_layers is 2.5; expected a positive whole number"),
    "a truth": ({"qk_layernorm": 1}, "qk_layernorm is 1; expected true or false"),
    "a name": ({"activation": "relu"}, 'activation is "relu"; expected one of gelu, squared_relu, silu, swiglu'),
    "a window": ({"window_size": [8]}, "window_size is [8]; expected two whole numbers from -1"),
    "a probability": ({"hidden_dropout": 1}, "hidden_dropout is 1; expected a probability in [0, 1)"),
    "another family": ({"family": "bert"}, "is of the family bert; expected gpt"),
    "of BERT": ({"num_tokentypes": 2}, "num_tokentypes is for the family bert, but the model's is gpt"),
}


@pytest.mark.parametrize(("values", "sentence"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_what_a_file_may_not_say_is_one_sentence(tmp_path: Path, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        taken("--model", file(tmp_path, **values))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["--qk-layernorm", "--normalization RMSNorm", "--window-size 8,0"])
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_what_a_familys_layers_would_pass_over_is_refused(tmp_path: Path, family: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"is given, but Megatron's {family.upper()} has no such thing"):
        taken("--model", file(tmp_path, family=family), *option.split(), families=("bert", "t5"))


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "sentence"),
    [
        (3, False, "--num-attention-heads 8 is not a multiple of --tp 3"),
        (8, True, "--seq-length 36 is not a multiple of --tp 8"),
        (1, True, "--sequence-parallel needs --tp of at least 2"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(tp: int, sequence_parallel: bool, sentence: str) -> None:
    shape = make_shape(**{**SIZES, "num_attention_heads": 8, "seq_length": 36}, num_query_groups=2)
    with pytest.raises(ValueError, match=sentence):
        check_layout(shape, Layout(tp=tp, sp=sequence_parallel), option="--tp")
    check_layout(shape, Layout(tp=2, sp=True))
    check_layout(shape, Layout(tp=4))  # two ranks share a group, as Megatron has it
    with pytest.raises(ValueError, match="--num-query-groups 2 and --tp 3 do not divide one another"):
        check_layout(dataclasses.replace(shape, num_attention_heads=6, ffn_hidden_size=96), Layout(tp=3), option="--tp")


def test_a_description_says_everything_and_is_read_again() -> None:
    shape = make_shape(**SIZES, window_size=[8, 0], num_query_groups=2)
    written = json.loads(json.dumps(shape.describe()))
    assert make_shape(**written) == shape


def test_what_an_older_description_does_not_say_is_as_in_gpt2() -> None:
    shape = make_shape(**SIZES, vocab_size=100)
    older = {"num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "max_position_embeddings"}
    older |= {"seq_length", "vocab_size", "untie_embeddings_and_output_weights"}
    described = {name: value for name, value in shape.describe().items() if name in older}
    assert complete_description(described) == shape.describe()


def test_on_a_cpu_a_window_hides_what_megatrons_mask_hides() -> None:
    import torch
    from megatron.core.fusions import fused_softmax

    from tempo_megatron.cpu import use_cpu

    use_cpu()
    for sq, skv, left, right in ((5, 5, 2, 0), (3, 7, 1, 0), (6, 6, 0, 2), (4, 4, 9, 0)):
        # As megatron.core.transformer.utils.get_sliding_window_causal_mask, which needs a CUDA device.
        everything = torch.ones(sq, skv, dtype=torch.bool)
        seen = torch.tril(torch.triu(everything, diagonal=skv - sq - left), diagonal=skv - sq + right)
        assert torch.equal(fused_softmax.get_sliding_window_causal_mask(sq, skv, (left, right)), ~seen)


def test_vocabularies_are_padded_for_tensor_parallelism() -> None:
    for given, padded in {(50257, 128, 1): 50304, (50257, 128, 2): 50432, (256, 128, 2): 256, (1, 1, 1): 1}.items():
        assert pad_vocab_size(*given) == padded
    with pytest.raises(ValueError, match="expected at least 1 for each"):
        pad_vocab_size(100, 0, 1)
