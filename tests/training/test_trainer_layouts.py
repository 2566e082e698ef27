"""The same training in every layout and ZeRO stage that DeepSpeed and Megatron can do together, compared by losses.

Stock draws other masks in another layout, so it trains without dropout; Tempo's masks are the same in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from covering import exhaustive
from training_job import BF16, Data, Run, run, successful, zero

STEPS = 6
COMMON = [*"--global-batch-size 4 --clip-grad 0.5 --log-params-norm --train-iters".split(), str(STEPS)]
NO_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0"]
TEMPO = ["--use-tempo"]
TP2 = "--tensor-model-parallel-size 2 "
SP = TP2 + "--sequence-parallel "
FULL = "--recompute-granularity full --recompute-method uniform "
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn "
KEEP_INPUTS = "--tempo-activation recompute --tempo-norm recompute "
LAYERS = '--tempo-layers {"0":{"activation":"recompute","attention":"softmax"},"1-":{"norm":"recompute"}} '
ROBERTA = ["--bert-no-binary-head", "--masking", "tokens", "--short-seq-prob", "0"]
T5 = ["--decoder-seq-length", "32"]
# Kind -> data, arguments, how far losses may be from those of one process, relative to them. fp32 sums in another order
# differ by about 1e-7 at each of the few hundred additions behind a loss. A learning rate of 2.01e-3 instead of 1e-3
# makes a difference of 3e-3 in step 2.
KINDS: dict[str, tuple[str, list[str], float]] = {
    "stock": ("data", NO_DROPOUT, 2e-6),
    "Tempo": ("data", TEMPO, 1e-4),
    "stock BERT": ("bert_data", NO_DROPOUT, 5e-6),
    "BERT": ("bert_data", TEMPO, 5e-6),
    "stock T5": ("t5_data", [*T5, *NO_DROPOUT], 5e-6),
    "T5": ("t5_data", [*T5, *TEMPO], 5e-6),
}
References = Callable[[str], Run]


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> References:
    """The run of a kind in one process, ZeRO 0, two accumulated micro batches."""
    found: dict[str, Run] = {}

    def get(kind: str) -> Run:
        if kind not in found:
            data, words, _ = KINDS[kind]
            evaluate = ["--eval-iters", "2"] if "stock" in kind else []
            folder = tmp_path_factory.mktemp("reference")
            found[kind] = successful(run(request.getfixturevalue(data), folder, *COMMON, *words, *evaluate))
        return found[kind]

    return get


def list_values(result: Run, name: str) -> list[float]:
    return [record[name] for record in result.of_kind("train")]


# Every kind of recomputation, of single values and of ZeRO's stages; test_trainer_gradients.py has each layout without,
# test_resharding.py masks of tensor and data parallelism at once.
OFTEN: list[tuple[str, int, str, dict[str, Any]]] = [
    ("stock", 2, SP, zero(1)),
    ("stock", 2, "", zero(2)),
    ("stock", 2, "", zero(3, stage3_param_persistence_threshold=0)),
    ("Tempo", 2, SP + SELECTIVE + "mlp", zero(0)),
    ("Tempo", 2, FULL + "--micro-batch-size 1", zero(3)),
    ("Tempo", 2, SP + FULL + LAYERS, zero(1)),
    ("BERT", 2, "", zero(3)),
    ("T5", 2, SP, zero(1)),
]
# Kind, processes -> words and the stage of ZeRO.
MORE: dict[tuple[str, int], list[tuple[str, int]]] = {
    ("stock", 1): [("--micro-batch-size 1", 0), ("--micro-batch-size 4", 1)],
    ("stock", 2): [
        *(("", 0), ("", 1), ("", 3), (TP2, 0), (TP2, 1), (SP, 0), (SP, 2), (SP, 3), (SP + FULL, 0), (SP + SELECTIVE, 0))
    ],
    ("stock", 4): [(SP, 3)],
    ("Tempo", 1): [(FULL + "--micro-batch-size 1", 0), (LAYERS, 0)],
    ("Tempo", 2): [
        *((TP2 + FULL + "--micro-batch-size 4", 1), (SP + FULL + "--micro-batch-size 1", 0)),
        (TP2 + "--micro-batch-size 4", 0),
        *((SP + words + "--micro-batch-size 4", 1) for words in ("", KEEP_INPUTS)),
        *(("--micro-batch-size 2", 1), (KEEP_INPUTS + "--micro-batch-size 1", 3), (SP + SELECTIVE + LAYERS, 0)),
    ],
    ("Tempo", 4): [(SP + "--micro-batch-size 1", 2)],
    ("stock BERT", 2): [(SP, 0)],
    ("BERT", 2): [(SP, 1), (TP2, 0), ("", 1)],
    ("stock T5", 2): [(SP, 0)],
    ("T5", 2): [(TP2 + FULL, 0), ("", 3)],
    ("T5", 4): [(SP, 2)],
}
RARELY = [(*case, words, zero(stage)) for case, rows in MORE.items() for words, stage in rows]


def find_marks(case: tuple[Any, ...]) -> list[pytest.MarkDecorator]:
    if case == ("stock", 2, SP, zero(1)):
        return []
    return [pytest.mark.slow, *([pytest.mark.exhaustive] if case in RARELY else [])]


@pytest.mark.parametrize(
    ("kind", "world_size", "words", "config"),
    [pytest.param(*case, marks=find_marks(case)) for case in (*OFTEN, *RARELY)],
    ids=str,
)
def test_every_layout_has_the_losses_and_norms_of_one_process(
    request: pytest.FixtureRequest,
    references: References,
    tmp_path: Path,
    kind: str,
    world_size: int,
    words: str,
    config: dict[str, Any],
) -> None:
    fixture, of_kind, relative = KINDS[kind]
    reference = references(kind)
    options = [*COMMON, *of_kind, *words.split()]
    found = successful(run(request.getfixturevalue(fixture), tmp_path, *options, world_size=world_size, config=config))
    assert len(found.losses) == STEPS and found.losses == pytest.approx(reference.losses, rel=relative)
    if kind == "stock":
        assert list_values(found, "grad_norm") == pytest.approx(list_values(reference, "grad_norm"), rel=50 * relative)
        assert list_values(found, "params_norm") == pytest.approx(list_values(reference, "params_norm"), rel=1e-6)


def test_the_reference_learns_and_is_validated(references: References) -> None:
    reference = references("stock")
    assert abs(reference.losses[0] - math.log(512)) < 0.1  # a fresh model knows nothing of 512 tokens
    assert reference.losses[-1] < reference.losses[0] - 0.1
    (last,) = reference.of_kind("validation")
    assert last["iteration"] == STEPS and last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    assert last["loss"] == pytest.approx(reference.losses[-1], abs=0.3)
    assert "perplexity" in reference.output
    assert f"params norm {list_values(reference, 'params_norm')[-1]:.3f}" in reference.output


def test_berts_two_losses_are_reported_and_begin_where_a_fresh_model_does(references: References) -> None:
    reference = references("stock BERT")
    first = reference.of_kind("train")[0]
    assert abs(first["lm_loss"] - math.log(512)) < 0.3 and abs(first["sop_loss"] - math.log(2)) < 0.2
    for record in (*reference.of_kind("train"), *reference.of_kind("validation")):
        assert record["loss"] == pytest.approx(record["lm_loss"] + record["sop_loss"], rel=1e-6)
    (validation,) = reference.of_kind("validation")
    assert validation["perplexity"] == pytest.approx(math.exp(validation["lm_loss"]))
    assert " | lm loss " in reference.output and " | sop loss " in reference.output


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "stock" in kind])
def test_tempo_has_stocks_losses_without_dropout(
    request: Any, references: References, tmp_path: Path, kind: str
) -> None:
    stock = references(kind)
    data, words, _ = KINDS[kind]
    found = successful(run(request.getfixturevalue(data), tmp_path, *words, *COMMON, *TEMPO))
    assert "loss=fused" in found.output and "loss=fused" not in stock.output
    for name in ("loss", *(("lm_loss", "sop_loss") if "BERT" in kind else ())):
        assert list_values(found, name) == pytest.approx(list_values(stock, name), rel=2e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", *exhaustive(["bert"], ["roberta"])])
def test_a_resumed_bert_or_t5_is_the_one_that_was_not_stopped(kind: str, request: Any, tmp_path: Path) -> None:
    data = request.getfixturevalue(f"{kind}_data")
    options = [*COMMON, *TEMPO, *(ROBERTA if kind == "roberta" else [])]
    save = ["--save", str(tmp_path / "save")]
    whole = successful(run(data, tmp_path / "whole", *options, *save, "--save-interval", "3"))
    (tmp_path / "save" / "latest").write_text("iter_0000003")
    rest = successful(run(data, tmp_path / "rest", *options, "--load", save[1]))
    assert rest.losses_hex == whole.losses_hex[3:] and len(rest.losses) == 3
    if kind == "t5":
        layout: dict[str, Any] = {"world_size": 2, "config": zero(1)}
        moved = successful(run(data, tmp_path / "moved", *options, *SP.split(), "--load", save[1], *save, **layout))
        assert moved.losses == pytest.approx(whole.losses[3:], rel=5e-6)
        evaluate = ["--eval-only", "--eval-iters", "2", "--load", save[1]]
        one, two = (
            successful(run(data, tmp_path / name, *options, *words, *evaluate, **settings)).of_kind("validation")
            for name, words, settings in (("one", [], {}), ("two", SP.split(), layout))
        )
        assert one[0]["loss"] == pytest.approx(two[0]["loss"], rel=5e-6)
    assert ("sop_loss" in whole.of_kind("train")[0]) == (kind == "bert")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_hundred_steps_in_fp32_have_stocks_losses_within_1e_4(data: Data, tmp_path: Path) -> None:
    # The whole batch at once: a quarter of the time.
    words = [*NO_DROPOUT, "--global-batch-size", "8", "--micro-batch-size", "8", "--train-iters", "100"]
    stock = successful(run(data, tmp_path / "stock", *words))
    tempo = successful(run(data, tmp_path / "tempo", *words, *TEMPO))
    assert len(stock.losses) == 100 and stock.losses[-1] < stock.losses[0] - 0.5
    assert tempo.losses != stock.losses  # it was not stock twice
    assert tempo.losses == pytest.approx(stock.losses, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["--use-tempo", "--no-use-tempo"])
@pytest.mark.parametrize("stage", [1, *exhaustive([2], [3])])
def test_bf16_stays_near_fp32(data: Data, references: References, tmp_path: Path, stage: int, switch: str) -> None:
    config = {**zero(stage), **BF16}
    words = [*COMMON, *NO_DROPOUT, *SP.split(), switch]
    result = successful(run(data, tmp_path, *words, world_size=2, config=config))
    assert result.losses == pytest.approx(references("stock").losses, rel=1e-3)
    assert result.losses != pytest.approx(references("stock").losses, rel=2e-6)  # it really was bf16


def test_dropout_changes_the_losses(references: References) -> None:
    """Else the agreement of layouts would say nothing about masks."""
    assert references("Tempo").losses != pytest.approx(references("stock").losses, rel=1e-3)


def give_built_models_the_fused_head() -> None:
    """As for who cannot choose the class: the model is stock's, and its loss is replaced once it is built."""
    from megatron.core.models.gpt import GPTModel

    from tempo_megatron import TempoConfig, tempoize_loss
    from tempo_megatron.models import build as models

    def build(**arguments: Any) -> GPTModel:
        built = GPTModel(**arguments)
        tempoize_loss(built, TempoConfig(loss="fused"))
        assert type(built) is GPTModel and "_postprocess" in vars(built)
        return built

    models.TempoGPTModel = build


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.exhaustive), 3])
def test_a_built_model_with_the_fused_head_trains_as_one_that_was_built_with_it(
    data: Data, tmp_path: Path, stage: int
) -> None:
    layout: dict[str, Any] = {"world_size": 2, "config": zero(stage)}
    short = [*COMMON, "--train-iters", "3", *TEMPO, "--untie-embeddings-and-output-weights"]
    constructed = successful(run(data, tmp_path / "constructed", *short, **layout))
    built = successful(run(data, tmp_path / "built", *short, **layout, before=give_built_models_the_fused_head))
    assert built.losses_hex == constructed.losses_hex


def test_single_layers_train_and_are_said_in_the_banner_and_the_metrics(
    data: Data, references: References, tmp_path: Path
) -> None:
    stock = references("stock")
    config = {"tempo": {"layers": {"0": {"attention": "off", "norm": "off"}}}}
    tempo = successful(run(data, tmp_path, *COMMON, *NO_DROPOUT, config=config))
    assert tempo.losses != stock.losses and tempo.losses == pytest.approx(stock.losses, rel=1e-4)
    assert "layers 0: norm=off attention=off" in tempo.output
    assert "norm in decoder.layers.0 (input_layernorm, pre_mlp_layernorm): off for layer 0" in tempo.output
    assert 'block: layers={"0": {"attention": "off", "norm": "off"}}' in tempo.output


@pytest.mark.slow
def test_loader_processes_read_what_the_rank_itself_would(data: Data, tmp_path: Path) -> None:
    alone, workers = (
        successful(run(data, tmp_path / number, "--num-workers", number, "--train-iters", "3")) for number in "01"
    )
    assert workers.losses_hex == alone.losses_hex


@pytest.mark.slow
def test_what_a_run_says_and_writes(data: Data, tmp_path: Path) -> None:
    """The banners of two runs in one folder, TensorBoard's events, a loss curve, metrics that are set aside."""
    board, plot = tmp_path / "board", tmp_path / "loss.png"
    config = {**zero(1), "my_note": 1, "tempo": {"enabled": False, "activation": "off"}}
    words = ["--train-iters", "2", "--no-use-tempo", "--tensorboard-dir", str(board), "--loss-plot", str(plot)]
    stock = successful(run(data, tmp_path, *words, config=config))
    said = "TP 1, DP 1|136,960 parameters|ZeRO 1, fp32|off (stock)|--no-use-tempo|activation=off|my_note".split("|")
    assert [words for words in said if words not in stock.output] == []
    assert plot.read_bytes().startswith(b"\x89PNG")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(board)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]

    result = successful(run(data, tmp_path, "--train-iters", "1", *TEMPO))
    assert f"the metrics of an earlier run are now in {tmp_path / 'metrics.jsonl.1'}" in result.output
    assert "attention  plain torch" in result.output and "params" not in str(result.of_kind("train"))
    # All of them "auto", with nothing in the way of the first choice.
    values = "activation=inplace norm=inplace dropout=recompute attention=flash loss=fused"
    assert f"{values} (arguments: --use-tempo; block: none)" in result.output
    replaced = "activation 2 of 2, norm 5 of 5, dropout 5 of 5, attention 2 of 2, loss 1 of 1"
    assert f"replaced   {replaced}\n" in result.output and "left       nothing\n" in result.output
    (described,) = result.of_kind("run")
    assert described["tempo"].pop("layers") == {}
    assert described["slots"]["dropout"] == {"tempo": 5, "all": 5}
    assert described["tempo"].pop("check") == "auto"
    assert {described["tempo"].pop(name) for name in ("linear_fc1", "linear_qkv", "moe_permute", "offload")} == {"off"}
    assert " ".join(f"{name}={value}" for name, value in described["tempo"].items()) == values
