"""The command that runs a Megatron-LM script with --use-tempo: its arguments, its errors, and what it leaves alone."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch
from distributed import run_megatron_ranks
from gpt import SEQ_LENGTH, VOCAB_SIZE, build_gpt, gpt_config
from kept_formula import LayerShape, count_layer_bytes
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn.functional import silu

from tempo_megatron import TempoConfig
from tempo_megatron.beside import is_ours
from tempo_megatron.cli import main as tempo_megatron
from tempo_megatron.extras import is_installed
from tempo_megatron.megatron_lm import run, versions
from tempo_megatron.megatron_lm.kept_bytes import measure_layers, read_layers
from tempo_megatron.megatron_lm.options import check_outputs, read_options
from tempo_megatron.megatron_lm.patches import find_obstacles
from tempo_megatron.megatron_lm.report import RunReport
from tempo_megatron.megatron_lm.samples import find_first_sample
from tempo_megatron.megatron_lm.versions import LaunchError
from tempo_megatron.slots.choose import choose

ROOT = Path(__file__).parents[2]


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a DeepSpeed JSON with a block and of one without, and of a bare block."""
    block = {"norm": "off", "loss": "off"}
    for name, content in {"ds": {"train_batch_size": 8, "tempo": block}, "plain": {"zero": 1}, "bare": block}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)


OFF, BLOCK = TempoConfig.off(), TempoConfig(norm="off", loss="off")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", OFF),
        ("--num-layers 2 --save x", OFF),
        ("--no-use-tempo", OFF),
        ("--num-layers 2 --use-tempo --bf16", TempoConfig()),
        ("--tempo-config bare.json", BLOCK),
        ("--tempo-config ds.json --tempo-norm inplace", TempoConfig(norm="inplace", loss="off")),
        ("--deepspeed_config ds.json --tempo-norm inplace", TempoConfig(norm="inplace", loss="off")),
        ("--deepspeed_config ds.json --no-use-tempo", OFF),
        ("--deepspeed_config plain.json", OFF),
    ],
)
def test_arguments_win_over_a_block_which_switches_tempo_on(in_folder: None, argv: str, expected: TempoConfig) -> None:
    assert read_options(argv.split()) == (expected, None, None, None)
    if not expected.is_off:
        assert read_options([*argv.split(), "--tempo-report", "r.json"]) == (expected, None, "r.json", None)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--tempo-norm off", "--tempo-norm is given but Tempo is off; add --use-tempo"),
        ("--tempo-report f", "--tempo-report is given but Tempo is off; add --use-tempo"),
        ("--use-tempo --tempo-norm of", "argument --tempo-norm: invalid choice: 'of'"),
        ("--use-tempo --tempo-config missing.json", r"--tempo-config missing.json cannot be read \(No such file"),
        ("--deepspeed_config .", r"--deepspeed_config . cannot be read \(Is a directory"),
        ("--tempo-config plain.json", 'has no "tempo" block; add one'),
        ("--tempo-config ds.json --deepspeed_config ds.json", "both hold a"),
    ],
)
def test_what_would_be_ignored_or_does_not_exist_is_refused(in_folder: None, argv: str, sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        read_options(argv.split())


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--num-layers", "2"], "--num-layers comes before the script"),
        (["--megatron-root", "x"], "no script is given; expected one of a Megatron-LM checkout"),
        (["missing.py"], "missing.py is not a file"),
        (["--megatron-root", "/", __file__], "--megatron-root is /, which holds no megatron/core and"),
        (["--use-tempo", "--tempo-norm"], "no script is given"),
        ([__file__, "--use-tempo", "--tempo-report", "/"], "--tempo-report: / is a folder; give a file in it"),
        (
            [__file__, "--use-tempo", "--tempo-report", f"{__file__}/x"],
            f"--tempo-report: {__file__}/x cannot be written",
        ),
        ([__file__, "--tempo-ledger", "/proc/x"], "--tempo-ledger: /proc/x.stage0.json cannot be written"),
    ],
)
@pytest.mark.usefixtures("with_training")
def test_a_wrong_command_is_one_sentence(capsys: pytest.CaptureFixture[str], argv: list[str], sentence: str) -> None:
    assert tempo_megatron(["run", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tempo-megatron run: ") and sentence in line


@pytest.fixture
def with_training(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if megatron.training were installed."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "megatron" / "training").mkdir(parents=True)
    (folder / "megatron" / "training" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(folder)


@pytest.mark.usefixtures("with_training")
def test_the_folder_of_a_report_is_made_at_the_start_and_nothing_is_written_yet(tmp_path: Path) -> None:
    check_outputs(str(tmp_path / "a" / "report.json"), str(tmp_path / "b" / "ledger"))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b"]


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["", "one"])
@pytest.mark.usefixtures("with_training")
def test_a_rank_that_is_no_number_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "0")
    monkeypatch.setenv(name, value)
    assert run.main([__file__, "--use-tempo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"run_megatron.py: {name} is {value!r}; expected a number of 0 or more; unset RANK")


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID"])
def test_another_rank_leaves_the_sentence_to_rank_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    assert run.main(["missing.py"]) == 2
    assert capsys.readouterr().err == ""


def make_checkout(folder: Path) -> Path:
    for name in ("core", "training"):
        (folder / "megatron" / name).mkdir(parents=True)
    script = folder / "examples" / "bert" / "pretrain_bert.py"
    script.parent.mkdir(parents=True)
    script.write_text("")
    return script


@pytest.mark.usefixtures("with_training")
def test_the_checkout_is_around_the_script_or_given_and_tempos_arguments_may_stand_in_front(tmp_path: Path) -> None:
    script = make_checkout(tmp_path)
    found = run.split_command_line(["--local_rank=3", str(script), "--use-tempo"])
    assert found == (tmp_path, script, ["--use-tempo", "--local_rank=3"], [])
    options = ["--use-tempo", "--tempo-norm", "off", "--tempo-loss=off", "--tempo-ledger"]
    found = run.split_command_line(
        [*options[:1], "--megatron-root", str(tmp_path), *options[1:], str(script), "train", "--lr", "1"]
    )
    assert found == (tmp_path, script, ["train", "--lr", "1"], [*options[:-1], "--tempo-ledger=tempo_ledger"])
    elsewhere = (Path(__file__), ["--x"], [])
    assert run.split_command_line([f"--megatron-root={tmp_path}", __file__, "--x"]) == (tmp_path, *elsewhere)
    # An installed megatron.training.
    assert run.split_command_line([__file__, "--x"]) == (None, *elsewhere)
    assert run.split_command_line([str(script)])[0] == tmp_path


@pytest.mark.skipif(is_installed("megatron.training"), reason="megatron.training is installed")
def test_a_script_elsewhere_asks_for_a_checkout_where_megatron_training_is_not_installed() -> None:
    with pytest.raises(LaunchError, match="megatron.training is not installed; give a Megatron-LM checkout with --meg"):
        run.split_command_line([__file__, "--x"])


def refuse() -> None:
    raise ValueError("a class of the user's")


@pytest.mark.parametrize(("module", "expected"), [(functools.partial(TempoConfig, norm="odd"), True), (refuse, False)])
def test_a_refusal_in_a_constructor_that_megatron_calls_is_known_as_ours(module: Any, expected: bool) -> None:
    # It raises the error of a module once more, with the module's name.
    with pytest.raises(ValueError) as caught:
        build_module(ModuleSpec(type("Module", (), {"__new__": lambda _: module()})))
    assert is_ours(caught.value) is expected


@pytest.mark.parametrize("place", ["megatron.core.parallel_state:nowhere", "megatron.core.nowhere:thing"])
def test_a_missing_place_is_named(place: str) -> None:
    module, _, attribute = place.partition(":")
    with pytest.raises(LaunchError, match=f"Megatron-core 9.9 has no {attribute} in {module}"):
        versions.get_hook(versions.Patch(place), "9.9")


def test_samples_are_numbered_as_megatrons_sampler_deals_them() -> None:
    from collections import Counter

    args = SimpleNamespace(consumed_train_samples=24, micro_batch_size=3, data_parallel_size=4)
    firsts = [find_first_sample(args, i, rank) for i in range(2) for rank in range(4)]
    samples = Counter(first + sample for first in firsts for sample in range(3))
    assert samples == Counter(range(24, 48))
    assert find_first_sample(args, 1, 2) == 24 + 12 + 6


@pytest.mark.slow
def test_kept_bytes_of_experts_and_latent_attention_are_a_mean_over_layers() -> None:
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 96, "bf16": True}
    sizes |= {"activation_func": silu, "gated_linear_unit": True, "add_bias_linear": False, "qk_layernorm": True}
    sizes |= {"normalization": "RMSNorm", "params_dtype": torch.bfloat16, "hidden_dropout": 0.0}
    sizes |= {"num_moe_experts": 4, "moe_ffn_hidden_size": 48, "moe_layer_freq": [0, 1], "attention_dropout": 0.0}
    sizes |= {"q_lora_rank": 32, "kv_lora_rank": 8, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    run = SimpleNamespace(seq_length=448, micro_batch_size=3, global_batch_size=3, data_parallel_size=1)
    run.use_distributed_optimizer, run.position_embedding_type = True, "rope"
    tempo = dataclasses.replace(TempoConfig.off(), activation="recompute", norm="recompute")
    found = measure_layers(read_layers(MLATransformerConfig(**sizes), tempo, run, has_transformer_engine=True))
    tokens, ffn, routed = 448 * 3, 96, 2 * 48
    # Between its linears a layer keeps the input of the activation, but not its result, of 2 bytes an element.
    # The router keeps 4 logits of 2 bytes instead of the places (int64) and probabilities (float32) of its 2 choices.
    experts = (tokens * (2 * (ffn + routed) + 2 * (8 + 4) - 4 * 2)) // 2
    # So do norms: in front of attention, of the vectors of queries and keys, and in front of MLP and experts.
    assert (found.stock or 0) - (found.tempo or 0) == experts + tokens * 2 * (64 + 32 + 8 + 64)


def test_kept_bytes_of_a_dense_model_are_those_of_the_formula_to_the_byte() -> None:
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 96, "bf16": True}
    config = TransformerConfig(
        **sizes, params_dtype=torch.bfloat16, tensor_model_parallel_size=2, sequence_parallel=True
    )
    run = SimpleNamespace(seq_length=448, micro_batch_size=3, global_batch_size=3, data_parallel_size=1)
    run.use_distributed_optimizer, run.position_embedding_type = True, "learned_absolute"
    tempo = TempoConfig(activation="inplace", norm="inplace", dropout="recompute", attention="flash", loss="off")
    layer = LayerShape(
        seq_length=448, micro_batch_size=3, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4,
        num_query_groups=4, kv_channels=16, dtype=torch.bfloat16, tensor_parallel=2, sequence_parallel=True,
        hidden_dropout=0.1, attention_dropout=0.1,
    )  # fmt: skip
    found = measure_layers(read_layers(config, tempo, run, has_transformer_engine=True))
    expected = [count_layer_bytes(layer, each, stock="transformer_engine") for each in (TempoConfig.off(), tempo)]
    assert [found.stock, found.tempo] == expected
    assert f"stock {expected[0]:,}, Tempo {expected[1]:,}, " in found.describe()


def test_a_script_that_builds_none_of_the_models_is_refused() -> None:
    report = RunReport("0.16.1", ROOT, None)
    with pytest.raises(LaunchError, match="builds no GPTModel, BertModel, T5Model or HybridModel"):
        report.publish_once()


def test_masks_are_left_to_stock_where_nobody_knows_their_samples_unless_these_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    config = TransformerConfig(**sizes, hidden_dropout=0.1, attention_dropout=0.0)
    config.cuda_graph_impl = "local"
    assert find_obstacles(config, RUN) == {}
    monkeypatch.setattr(megatron.core, "__version__", "0.15.3")
    for arguments, clause, remedy in (
        (RUN, "CUDA graphs are on, in which Tempo draws masks since megatron-core 0.16", "leave CUDA graphs off"),
        (None, "Megatron's arguments, which say what samples", "call initialize_megatron of megatron.training"),
    ):
        obstacles = find_obstacles(config, arguments)
        choices = choose(config, TempoConfig(), obstacles)
        assert choices.config == dataclasses.replace(choose(config, TempoConfig()).config, dropout="off")
        assert set(choices.reasons) == {"dropout"} and clause in choices.reasons["dropout"]
        with pytest.raises(ValueError, match=f'{remedy}, or set tempo.dropout to "off"'):
            choose(config, TempoConfig(dropout="recompute"), obstacles)
    config.cuda_graph_impl = "none"
    assert find_obstacles(config, RUN) == {}


PACKED = SimpleNamespace(sft=True)
STAGES = {"pipeline_model_parallel_size": 2}
SHARED = {"context_parallel_size": 2, "hidden_dropout": 0.1}
SHARED_DROP = "sft is on with context_parallel_size 2 and hidden_dropout 0.1, and Megatron's scripts do not say which"


def chunks_of(comm_type: Any, dropout: float = 0.1, size: int = 2) -> dict[str, Any]:
    return {"context_parallel_size": size, "cp_comm_type": comm_type, "attention_dropout": dropout}


def cut(seq_length: int) -> SimpleNamespace:
    return SimpleNamespace(seq_length=seq_length, hierarchical_context_parallel_sizes=[2, 2])


def no_chunks(seq_length: int, size: int, chunk: str) -> str:
    return (
        f"seq_length {seq_length} gives context_parallel_size {size} chunks of {chunk} tokens, and attention with "
        "dropout on a GPU takes multiples of 8"
    )


# Megatron's version, its configuration and arguments, and why operations cannot be had: documents that a stage does not
# know, documents of unknown samples that ranks share, and chunks that masks on a GPU cannot have.
OBSTACLES: list[tuple[str, dict[str, Any], SimpleNamespace, set[str], str]] = [
    ("0.16.1", STAGES, PACKED, {"attention"}, "sft is on with 2 pipeline stages, and megatron-core 0.16.1 tells the"),
    ("0.16.1", {}, PACKED, set(), ""),
    ("0.16.1", STAGES, SimpleNamespace(sft=False), set(), ""),
    ("0.19.2", STAGES, PACKED, set(), ""),
    ("0.16.1", SHARED, PACKED, {"dropout", "attention"}, SHARED_DROP),
    ("0.16.1", {**SHARED, "hidden_dropout": 0.0}, PACKED, set(), ""),
    ("0.16.1", {**SHARED, "context_parallel_size": 1}, PACKED, set(), ""),
    ("0.16.1", SHARED, SimpleNamespace(sft=False), set(), ""),
    ("0.16.1", chunks_of("p2p"), cut(48), {"attention"}, no_chunks(48, 2, "12")),
    ("0.16.1", chunks_of(["a2a", "all_gather"]), cut(36), {"attention"}, no_chunks(36, 2, "9")),
    ("0.16.1", chunks_of("a2a+p2p", size=4), cut(40), {"attention"}, no_chunks(40, 4, "10")),
    ("0.16.1", chunks_of("a2a+p2p", size=4), cut(64), set(), ""),
    ("0.16.1", chunks_of("a2a"), cut(36), set(), ""),
    ("0.16.1", chunks_of("p2p"), cut(64), set(), ""),
    ("0.16.1", chunks_of("p2p", dropout=0.0), cut(48), set(), ""),
]


@pytest.mark.parametrize(("version", "settings", "arguments", "operations", "reason"), OBSTACLES)
def test_what_a_run_cannot_have_is_known_at_the_start(
    version: str, settings: Any, arguments: Any, operations: set[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: SimpleNamespace(is_cuda=True))
    sizes = {"pipeline_model_parallel_size": 1, "context_parallel_size": 1}
    config = SimpleNamespace(**{**sizes, "hidden_dropout": 0.0, "attention_dropout": 0.0, **settings})
    found = find_obstacles(config, arguments)
    assert set(found) == operations
    assert all(refusal.reason.startswith(reason) for refusal in found.values())


def test_the_launcher_says_how_it_is_used() -> None:
    command = [sys.executable, str(ROOT / "launch" / "run_megatron.py"), "--help"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "usage: run_megatron.py [--megatron-root DIR] [TEMPO'S ARGUMENTS] SCRIPT" in found.stdout


RUN = SimpleNamespace(
    seq_length=SEQ_LENGTH,
    micro_batch_size=2,
    global_batch_size=8,
    data_parallel_size=1,
    use_distributed_optimizer=False,
    optimizer="adam",
)


@pytest.mark.slow
def test_out_of_memory_is_explained_for_the_model_that_the_run_builds() -> None:
    (found,) = run_megatron_ranks(_read_orders, 1, 1)
    assert found["none"] == "no GPTModel, BertModel or T5Model is built"
    bert = found["bert"]
    assert (bert.model.family, bert.model.num_tokentypes, bert.model.add_binary_head) == ("bert", 2, True)
    assert bert.tempo.is_off and bert.recompute == ("core_attn",)
    gpt = found["gpt"]
    assert (gpt.model.family, gpt.model.window_size, gpt.model.activation) == ("gpt", (4, 0), "geglu")
    assert gpt.model.vocab_size == VOCAB_SIZE and gpt.num_micro_batches == 4
    assert gpt.stock_attention == "fused" and not gpt.masked_softmax_fusion
    assert found["unfused"].stock_attention == "unfused"
    # What the layers were built with, and not what was asked for.
    assert gpt.tempo.norm == "recompute" and gpt.tempo.activation == "recompute"
    assert "gated quick_gelu" in found["quick geglu"]
    assert found["sgd"] == "the run has the optimizer sgd, and what is known is adam"
    assert (found["block"].recompute, found["block"].recompute_num_layers) == (("full",), 1)
    assert found["two together"].startswith("--recompute-method uniform recomputes 2 layers together, and the estimate")
    assert found["two shapes"] == "models of several shapes are built, and the estimate knows one"


def _read_orders() -> dict[str, Any]:
    import gc

    from megatron.core.activations import quick_gelu
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.transformer.enums import AttnBackend
    from torch.nn import functional as F

    from tempo_megatron.megatron_lm.run_reader import read_built_run

    found: dict[str, Any] = {}

    def read(name: str, run: Any = RUN) -> None:
        try:
            found[name] = read_built_run(run)
        except ValueError as error:
            found[name] = str(error)

    def read_gpt(name: str, tempo: TempoConfig, run: Any = RUN, **overrides: Any) -> Any:
        model = build_gpt(gpt_config(**overrides), tempo)
        read(name, run)
        return model

    read("none")
    selective = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    bert = BertModel(gpt_config(**selective), 2, bert_layer_local_spec, VOCAB_SIZE, SEQ_LENGTH)
    read("bert")
    del bert
    gc.collect()
    geglu = {"gated_linear_unit": True, "activation_func": F.gelu}
    gpt = read_gpt("gpt", TempoConfig(norm="recompute"), **geglu, window_size=(4, 0))
    gpt.config.attention_backend = AttnBackend.unfused
    read("unfused")
    read("sgd", SimpleNamespace(**{**vars(RUN), "optimizer": "sgd"}))
    read_gpt("two shapes", TempoConfig.off())
    del gpt
    gc.collect()
    read_gpt("quick geglu", TempoConfig(), gated_linear_unit=True, activation_func=quick_gelu)
    gc.collect()
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    gpt = read_gpt("block", TempoConfig(), **block)
    del gpt
    gc.collect()
    read_gpt("two together", TempoConfig(), **{**block, "recompute_method": "uniform", "recompute_num_layers": 2})
    return found
