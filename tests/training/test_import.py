"""What import makes of a model of transformers computes the same, goes back bit for bit, and trains in any layout."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_megatron_ranks
from imported_models import EXPERTS, MODELS, OFTEN, build, call, megatron_logits_of_all, save
from run_configs import NEEDED, decide
from safetensors.torch import load_file, save_file
from training_job import Data, limit_file_size, run, successful

from tempo_megatron.cli import main
from tempo_megatron.data.tokenizer import GPT2Tokenizer
from tempo_megatron.training.checkpoint_files.export import read_weights
from tempo_megatron.training.checkpoint_files.folder import find_damage, read_description
from tempo_megatron.training.checkpoint_files.saved_state import SavedState


def import_model(source: Path, to: Path, *more: str) -> int:
    return main(["import", "--from", str(source), "--to", str(to), *more])


def export(load: Path, folder: Path, *more: str) -> Path:
    words = ["--output", str(folder / "model.safetensors"), "--format", "huggingface", *more]
    assert main(["export", "--load", str(load), *words]) == 0
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder, in one file or several."""
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def read_trained(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint of the trainer, or of import, by Megatron's names."""
    state = SavedState(checkpoint, read_description(checkpoint))
    return dict(zip(state.list_names(), read_weights(state), strict=True))


OTHERS = [pytest.param([name], id=name, marks=pytest.mark.exhaustive) for name in MODELS if name not in OFTEN]


@pytest.mark.slow
@pytest.mark.parametrize("names", [pytest.param(OFTEN, id="each family"), *OTHERS])
def test_megatron_computes_what_transformers_does_and_the_model_goes_back(names: list[str], tmp_path: Path) -> None:
    """The vocabulary of 90 tokens is padded to 128 rows."""
    cases, expected = [], []
    for name in names:
        model, folder = build(name), tmp_path / name
        save(model, folder / "hf", max_shard_size="20KB" if name in ("Qwen 3", "BERT") else "5GB")
        assert import_model(folder / "hf", folder / "imported") == 0
        checkpoint = folder / "imported" / "iter_0000000"
        described = read_description(checkpoint)
        assert described["padded_vocab_size"] == 128 and find_damage(checkpoint, described["files"], 0, 1) is None
        tokens = torch.randint(90, (2, 32))
        types = torch.randint(2, tokens.shape) if described["num_tokentypes"] else None
        cases.append((described, read_trained(checkpoint), tokens, types))
        if name in EXPERTS:  # those of a layer in one tensor, as they are in memory
            save(model, folder / "stacked", save_original_format=False)
            assert any(value.dim() == 3 for value in read(folder / "stacked").values())
            assert import_model(folder / "stacked", folder / "imported_stacks") == 0
            stacked = read_trained(folder / "imported_stacks" / "iter_0000000")
            assert stacked.keys() == cases[-1][1].keys()
            assert all(torch.equal(stacked[key], value) for key, value in cases[-1][1].items())
        expected.append(call(model, tokens, types))
        there, back = read(folder / "hf"), read(export(folder / "imported", folder / "back"))
        # Export writes the bias of BERT's head by both of its names, and transformers the first.
        assert back.keys() - there.keys() <= {"cls.predictions.decoder.bias"} and back.keys() >= there.keys()
        for key, value in there.items():
            assert torch.equal(back[key], value) and back[key].dtype == value.dtype, f"{name}: {key}"
        loaded, seen = type(model).from_pretrained(folder / "back", output_loading_info=True)
        assert not any(seen[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        for ours, theirs in zip(call(loaded.eval(), tokens, types), expected[-1], strict=True):
            assert torch.equal(ours, theirs), name
    (found,) = run_megatron_ranks(megatron_logits_of_all, 1, 1, cases)
    for name, ours, theirs in zip(names, found, expected, strict=True):
        logits = ours if isinstance(ours, tuple) else (ours,)
        assert len(logits) == len(theirs)
        for one, other in zip(logits, theirs, strict=True):
            rows = one if one.size(-1) == 2 else one[..., :90]
            assert other.std() > 0.1 and (rows - other).abs().max() <= 2e-5 * max(1.0, float(other.abs().max())), name
            if one.size(-1) == 128:
                # The rows of padding have the mean of the logits, so that they take no more than their share.
                mean = other.mean(-1, keepdim=True).expand(*other.shape[:-1], 38)
                torch.testing.assert_close(one[..., 90:], mean, rtol=0, atol=1e-4)


# The job's command line has other sizes.
OF_MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --make-vocab-size-divisible-by 128".split()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with the vocabulary of the training data, and its tokenizer's and generation's files."""
    folder = save(build("Llama 3.2", vocab_size=512, tie_word_embeddings=False), tmp_path_factory.mktemp("llama"))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.slow
def test_a_llama_is_imported_trained_at_tp_2_and_loaded_by_transformers(
    data: Data, llama: Path, tmp_path: Path
) -> None:
    import transformers

    assert import_model(llama, tmp_path / "imported") == 0
    words = ["--pretrained-checkpoint", str(tmp_path / "imported"), "--save", str(tmp_path / "save")]
    words += ["--load", str(tmp_path / "save"), "--train-iters", "50", "--seq-length", "32", "--use-tempo"]
    layout = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    config = {"zero_optimization": {"stage": 1}}
    first = successful(
        run(data, tmp_path, *words, *OF_MODEL, *layout, "--exit-interval", "25", world_size=2, config=config)
    )
    # The same command goes on from its own checkpoint, here with other processes.
    rest = successful(run(data, tmp_path, *words, *OF_MODEL, config={}))
    assert f"the weights are those of {tmp_path / 'imported' / 'iter_0000000'}" in first.output
    assert "going on after step 25" in rest.output and "no longer those of" in rest.output
    assert (len(first.losses), len(rest.losses)) == (25, 50)  # in one file
    assert rest.losses[-1] < first.losses[0] - 0.5
    model = transformers.LlamaForCausalLM.from_pretrained(export(tmp_path / "save", tmp_path / "hf")).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf" / "tokenizer")
    assert tokenizer("äöü 世界")["input_ids"] == GPT2Tokenizer(data.vocab_file, data.merge_file).tokenize("äöü 世界")
    checkpoint = tmp_path / "save" / "iter_0000050"
    described = read_description(checkpoint)
    tokens = torch.randint(512, (2, 32))
    case = (described, read_trained(checkpoint), tokens)
    ((found,),) = run_megatron_ranks(megatron_logits_of_all, 1, 1, [case])
    (expected,) = call(model, tokens)
    assert (found - expected).abs().max() <= 2e-5 * float(expected.abs().max())


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def change_tensors(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    """Set or, with None, remove tensors; a name has _ for its points."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        names = {name.replace(".", "_"): name for name in tensors}
        new = {names.get(name, name): value for name, value in changes.items()}
        save_file(
            {name: value for name, value in {**tensors, **new}.items() if value is not None},
            folder / "model.safetensors",
        )

    return change


def remove(name: str, instead: str | None = None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).rename(folder / instead) if instead else (folder / name).unlink()

    return change


def damage(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def index_a_missing_file(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "b"}}))


_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config.json": (remove("config.json"), "has no config.json; give the folder of a model"),
    "no safetensors": (remove("model.safetensors"), "has no model.safetensors; save the model with save_pretrained"),
    "a pickle": (remove("model.safetensors", "pytorch_model.bin"), "has pytorch_model.bin, which may run code"),
    "cut off": (damage, "model.safetensors is damaged or no safetensors file"),
    "a missing shard": (index_a_missing_file, "/b is missing; give the whole folder"),
    "a missing key": (change_tensors(model_norm_weight=None), "the files lack model.norm.weight, which the model of"),
    "a key too many": (change_tensors(score=torch.ones(2)), "the files have score, which the model of config.json has"),
    "another shape": (
        change_tensors(model_norm_weight=torch.ones(31)),
        "model.norm.weight has the shape [31], and config.json makes it [32]; give",
    ),
    "another dtype": (
        change_tensors(model_norm_weight=torch.ones(32, dtype=torch.int8)),
        "model.norm.weight is of dtype I8; expected one of F32, BF16, F16, so convert it first",
    ),
    "tied and different": (
        change_config(tie_word_embeddings=True),
        "lm_head.weight differs from model.embed_tokens.weight, and the model of config.json has one tensor for both",
    ),
    "BERT": (change_config(model_type="bert"), "(its norms come after attention and MLP, and those of Megatron's BERT"),
    "DeepSeek-V3": (change_config(model_type="deepseek_v3"), "(its attention is latent and a bias balances its"),
    "noise": (
        change_config(model_type="mixtral", num_local_experts=2, num_experts_per_tok=1, router_jitter_noise=0.1),
        "router_jitter_noise is 0.1; expected 0.0: the trainer's routers have no noise",
    ),
    "an unknown family": (change_config(model_type="mamba"), "is of model_type 'mamba', which is no model of the"),
    "an activation": (change_config(hidden_act="relu"), "hidden_act is 'relu'; expected one of silu, gelu, gelu_new,"),
    "biases": (change_config(attention_bias=True), "attention_bias is True; mlp_bias is another, and Megatron has"),
    "a scaling of rope": (change_config(rope_parameters=_YARN), "Megatron scales rope as Llama 3 does or not at all"),
    "a base of rope": (
        change_config(rope_parameters={"rope_theta": 0.5}),
        "rope_theta is 0.5; expected a whole number",
    ),
    "layers without a window": (
        change_config(model_type="qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
        "sliding_window is 4; max_window_layers or layer_types leaves layers without it",
    ),
    "quantised": (change_config(quantization_config={"bits": 4}), "its weights are quantised; give a folder of whole"),
    "a size": (change_config(num_attention_heads=3), "--num-attention-heads 3 is not a multiple of"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_cannot_be_imported_is_one_sentence_and_leaves_nothing(
    llama: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(llama, tmp_path / "hf")
    change, said = REFUSED[how]
    change(tmp_path / "hf")
    assert import_model(tmp_path / "hf", tmp_path / "imported") == 2
    message = capsys.readouterr().err
    assert said in message and message.startswith("tempo-megatron import: ") and message.count("\n") == 1
    assert not (tmp_path / "imported").exists()


def test_a_killed_import_leaves_no_checkpoint_and_is_begun_anew(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "imported"
    (to / "iter_0000000.tmp").mkdir(parents=True)  # as kill -9 leaves it
    (to / "iter_0000000.tmp" / "weights.safetensors").write_bytes(b"half")
    with limit_file_size(10_000):
        assert import_model(llama, to) == 2
    assert "cannot be written ([Errno 27] File too large); free some space" in capsys.readouterr().err
    assert [path.name for path in to.iterdir()] == ["lock"]
    assert import_model(llama, to) == 0
    assert (to / "latest").read_text() == "iter_0000000\n"
    assert import_model(llama, to) == 2
    assert "already holds iter_0000000; give another folder" in capsys.readouterr().err


def test_the_tokenizer_and_the_special_tokens_go_with_the_model(llama: Path, tmp_path: Path) -> None:
    assert import_model(llama, tmp_path / "imported") == 0
    folder = export(tmp_path / "imported", tmp_path / "hf")
    assert (folder / "tokenizer.json").read_text() == "{}"
    config, there = (json.loads((each / "config.json").read_text()) for each in (folder, llama))
    generation = json.loads((folder / "generation_config.json").read_text())
    for name in ("bos_token_id", "eos_token_id"):
        assert config[name] == generation[name] == there[name]


def test_a_run_has_the_imported_model_and_may_change_little_of_it(llama: Path, tmp_path: Path) -> None:
    assert import_model(llama, tmp_path / "imported") == 0
    begin = ["--pretrained-checkpoint", str(tmp_path / "imported")]
    words = [*begin, *"--seq-length 64 --rotary-base 1000000 --hidden-dropout 0.1".split()]
    model = decide(tmp_path, *NEEDED, *words).model
    assert (model.seq_length, model.rotary_base, model.hidden_dropout, model.num_query_groups) == (64, 1000000, 0.1, 2)
    assert (model.activation, model.rope_scaling_factor, model.vocab_size) == ("swiglu", 32.0, 512)
    save(build("BERT"), tmp_path / "bert")
    assert import_model(tmp_path / "bert", tmp_path / "imported_bert") == 0
    begin_bert = ["--pretrained-checkpoint", str(tmp_path / "imported_bert"), "--seq-length", "32"]
    bert = decide(tmp_path, *NEEDED, *begin_bert, family="bert").model
    assert (bert.num_tokentypes, bert.add_binary_head, bert.norm_epsilon) == (2, True, 1e-12)
    for words, said in [
        (begin_bert, "holds a model of the family bert; train it with the script for that"),
        ([*begin], "--seq-length is missing; give it"),
        (
            [*begin, "--seq-length", "64", "--hidden-size", "64"],
            "its hidden_size is 32, this run's is 64, so it cannot",
        ),
        (["--load", begin[1]], "holds a model that was imported, and no run to go on with; give the folder as"),
        (["--pretrained-checkpoint", str(tmp_path)], "holds no checkpoint; give a folder that import or the trainer"),
    ]:
        with pytest.raises(ValueError, match=re.escape(said)):
            decide(tmp_path, *NEEDED, *words)
