"""The estimate: the paper's layer, schedules, stages, GPUs' modules, and the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import parametrize_covering
from kept_formula import LayerShape, count_layer_bytes
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from runs import build_run, change_run

from tempo_kernels.attention import cpu, use_gpu_blocks
from tempo_kernels.attention.settings import Inputs, Kept, Settings
from tempo_megatron import TempoConfig
from tempo_megatron.cli import main
from tempo_megatron.memory.megatron.read_run import deal_out_layers
from tempo_megatron.memory.plan.gpu import H100, Chip
from tempo_megatron.memory.rank.estimate import estimate_ranks
from tempo_megatron.memory.rank.play import list_events
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.show.tree import format_trees, list_modules
from tempo_megatron.memory.simulated.chunk import simulate_chunk
from tempo_megatron.memory.simulated.chunk_memory import LAYERS, ChunkMemory
from tempo_megatron.memory.tape.follower import Follower, count_storage_bytes
from tempo_megatron.models.shape import ModelShape, make_shape
from tempo_megatron.words.argument_types import format_bytes

OFF = TempoConfig.off()
FLASH = TempoConfig(activation="inplace", norm="inplace", dropout="recompute", attention="flash", loss="fused")
RECOMPUTE = TempoConfig(activation="recompute", norm="recompute")
# arXiv 2205.05198, table 3: heads, hidden size, layers, micro batch; s 2048, v 51,200, t 8.
PAPER = {"22B": (64, 6144, 48, 4), "175B": (96, 12288, 96, 1), "530B": (128, 20480, 105, 1), "1T": (160, 25600, 128, 1)}
SMALL: dict[str, Any] = {
    "num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 500
}  # fmt: skip


MIXTURE: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 96, "add_bias_linear": False}


def simulate(values: dict[str, Any], tempo_config: TempoConfig = OFF, **settings: Any) -> Any:
    shape = make_shape(**{"vocab_size": 1024, **values})
    return simulate_chunk(build_run(model=shape, tempo=tempo_config, **settings), range(shape.num_layers))


def count_expert_parameters(memory: ChunkMemory) -> int:
    return sum(each.size for each in memory.parameters if each.is_expert)


def keep_of_middle_layer(memory: Any) -> int:
    layers = [phase for phase in memory.forward if phase.part == LAYERS]
    return int(layers[len(layers) // 2].growth)


@parametrize_covering(
    each={"name": list(PAPER), "recompute": [(), ("core_attn",), ("full",)], "sequence_parallel": [False, True]}
)
def test_a_layer_keeps_what_the_paper_publishes(name: str, recompute: tuple[str, ...], sequence_parallel: bool) -> None:
    """Equations 1 to 6 of arXiv 2205.05198: 16 bits, a byte per dropped element, unfused attention."""
    a, h, _, b = PAPER[name]
    s, t = 2048, 8
    sizes = {"num_layers": 4, "hidden_size": h, "num_attention_heads": a, "seq_length": s}
    kept = keep_of_middle_layer(simulate(sizes, tp=t, sp=sequence_parallel, recompute=recompute, micro_batch_size=b))
    scores = 0.0 if recompute else 5 * a * s / (h * t)
    published = s * b * h * ((34 / t if sequence_parallel else 10 + 24 / t) + scores)
    if recompute == ("full",):
        published = 2 * s * b * h / (t if sequence_parallel else 1)
    assert kept == pytest.approx(published, rel=0.01)


@parametrize_covering(
    each={
        "tempo_config": {"off": OFF, "auto": TempoConfig(), "recompute": RECOMPUTE},
        "sequence_parallel": [False, True],
        "attention": ["unfused", "fused"],
    }
)
def test_transformer_engines_layer_keeps_what_the_formula_says(
    tempo_config: TempoConfig, sequence_parallel: bool, attention: str
) -> None:
    sizes = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 512}
    memory = simulate(sizes, tempo_config, tp=2, sp=sequence_parallel,
                      stock="transformer_engine", stock_attention=attention)  # fmt: skip
    layer = LayerShape(
        seq_length=512, micro_batch_size=1, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=16,
        num_query_groups=16, kv_channels=64, tensor_parallel=2, sequence_parallel=sequence_parallel,
        hidden_dropout=0.1, attention_dropout=0.1,
    )  # fmt: skip
    filled = tempo_config.fill_auto(dataclasses.asdict(FLASH))
    assert keep_of_middle_layer(memory) == pytest.approx(
        count_layer_bytes(layer, filled, stock="transformer_engine", stock_attention=attention), rel=0.001
    )


def test_the_tree_says_what_each_modules_attention_holds() -> None:
    sizes = {"num_layers": 1, "hidden_size": 256, "num_attention_heads": 2, "seq_length": 256, "vocab_size": 256}
    shape, rows = make_shape(**sizes), 2 * 256
    of_q, grouped = 4 * 128 * rows, dataclasses.replace(shape, num_query_groups=1)

    def find(gpu: str | None = None, shape: ModelShape = shape, tempo: TempoConfig = OFF, **of_run: Any) -> int:
        chip = Chip(8, 108) if gpu == "a100" else H100
        of_all = {"model": shape, "tempo": tempo, "gpu": gpu, "chip": chip, "stock": "transformer_engine"}
        tree = list_modules(build_run(**{**of_all, **of_run}), range(1))
        (text,) = [line for line in format_trees("", [tree]).splitlines() if "core_attention" in line]
        assert float(text.split()[2]) == round(tree.workspace_bytes / 2**20, 2)
        return tree.workspace_bytes

    assert find("h100") == find(shape=grouped) == 4 * rows + of_q, "of cuDNN's frontend"
    assert find("h100", deterministic=True) == 4 * rows
    assert find("a100") == 4 * rows + of_q, "of FlashAttention"
    assert find("a100", grouped) == 4 * rows + 2 * of_q, "and gradients of k and v of each head"
    assert find("a100", deterministic=True) == 4 * rows + 54 * of_q, "each multiprocessor has a head's sums"
    assert find("a100", tempo=FLASH) == find("h100", tempo=FLASH) == 4 * rows, "Tempo's passes sum nothing in float32"
    plain = dataclasses.replace(shape, attention_dropout=0.0)
    assert find("h100", plain, FLASH) > 4 * rows, "without dropout torch's own attention does"
    assert find(stock="local") == 0, "unfused attention keeps what it makes"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_softmax_forms_blocks_have_the_row_of_attentions_workspaces(dropout: float) -> None:
    sizes = {"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 2, "seq_length": 256}
    shape = make_shape(**{**sizes, "vocab_size": 64, "attention_dropout": dropout})
    softmax = dataclasses.replace(FLASH, attention="softmax")
    (rank,) = estimate_ranks(Run(model=shape, tempo=softmax, stock="local", dtype=torch.float32))
    q, k, v, grad = (torch.zeros(256, 1, 2, 16) for _ in range(4))
    probabilities = torch.zeros(1, 2, 256, 256)
    settings = Settings(True, 1.0, dropout, 0, 0, 0)
    with use_gpu_blocks(), Follower(q, k, v, grad, probabilities) as seen:
        grads, rise = seen.measure(
            lambda: cpu.backward(grad, Inputs(q, k, v), Kept(None, None, probabilities), settings)
        )
    real = rise - count_storage_bytes(grads[:3])
    named = rank.parts["attention's workspaces"]
    # A GPU draws bits in one piece, a CPU in several.
    assert named == real if dropout == 0 else named > real
    assert real > probabilities.nbytes


@pytest.mark.parametrize(
    ("values", "tempo_config", "settings", "ends"),
    [
        ({}, OFF, {"stock": "cpu"}, (True, True)),
        ({}, TempoConfig(), {}, (False, True)),
        ({"family": "bert"}, OFF, {}, (True, False)),
        ({"family": "t5"}, TempoConfig(layers={"4": {"attention": "off"}}), {}, (True, True)),
        ({}, TempoConfig(layers={"0-1": {"attention": "off"}}), {}, (False, False)),
        # One middle layer of each kind runs, for two and for three.
        ({"num_layers": 9}, OFF, {"recompute": ("full",), "recompute_num_layers": 4}, (True, True)),
        ({**MIXTURE, "moe_aux_loss_coeff": 0.0}, OFF, {"stock": "transformer_engine"}, (True, True)),
    ],
)
def test_three_layers_show_the_memory_of_all(
    values: dict[str, Any], tempo_config: TempoConfig, settings: dict[str, Any], ends: tuple[bool, bool]
) -> None:
    """Also where the chunk's first layer gets hidden states, and its last one their gradient."""
    shape = make_shape(**{**SMALL, "num_layers": 6, **values})
    run = Run(model=shape, tempo=tempo_config, micro_batch_size=2, **settings)
    few, every = (
        simulate_chunk(run, range(shape.num_layers), pre_process=ends[0], post_process=ends[1], longest_row=longest_row)
        for longest_row in (3, 9)
    )
    assert few == every


_SPLIT = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_ACCOUNTS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


@pytest.mark.parametrize(
    ("num_layers", "stages", "chunks", "split"),
    [
        *((7, 4, 1, (1, None)), (8, 4, 1, (None, 5)), (10, 4, 1, (2, 4)), (8, 2, 1, (3, 5)), (8, 4, 1, (None, None))),
        *((14, 4, 2, (True, True)), (6, 4, 1, (True, True)), (23, 4, 3, (True, False))),
    ],
)
def test_chunks_have_the_layers_that_megatron_gives_them(
    num_layers: int, stages: int, chunks: int, split: tuple[Any, Any]
) -> None:
    names = _ACCOUNTS if isinstance(split[0], bool) else _SPLIT
    config = TransformerConfig(
        num_layers=num_layers, hidden_size=64, num_attention_heads=4, pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None, pipeline_dtype=torch.float32,
        **dict(zip(names, split, strict=True)),
    )  # fmt: skip
    run = build_run(
        model=make_shape(**{**SMALL, "num_layers": num_layers}), tempo=OFF, pp=stages, chunks=deal_out_layers(config)
    )
    listed = [run.list_chunks(stage) for stage in range(stages)]
    places = range(chunks) if chunks > 1 else (None,)
    found = [[len(layers) for layers in of_stage] for of_stage in listed]
    assert found == [[get_num_layers_to_build(config, vp, stage) for vp in places] for stage in range(stages)]
    assert [n for of_chunk in zip(*listed, strict=True) for layers in of_chunk for n in layers] == [*range(num_layers)]
    if chunks == 1:
        layer, embedding, positions = 12 * 64 * 64 + 13 * 64, 512 * 64, 32 * 64
        others = [embedding + positions, *[0] * (stages - 2), embedding + 2 * 64]
        expected = [n * layer + m for (n,), m in zip(found, others, strict=True)]
        assert [rank.num_parameters for rank in estimate_ranks(run)] == expected


@pytest.mark.parametrize("group", [4, 6, 8])
def test_micro_batches_pass_through_chunks_in_the_groups_of_megatron(group: int) -> None:
    table = get_schedule_table(12, 3, group)
    forwards = [event for event in list_events(1, 4, 3, 12, group) if event.is_forward]
    assert [(event.micro_batch, event.chunk) for event in forwards] == list(table)
    before_the_first_backward = [event.is_forward for event in list_events(1, 4, 3, 12, group)].index(False)
    assert before_the_first_backward == 2 * (4 - 1 - 1) + (3 - 1) * group + 1


def test_context_parallel_ranks_keep_their_share_of_the_tokens_and_divide_states_like_data_parallel_ones() -> None:
    run = build_run(model=make_shape(**SMALL), tempo=OFF, stock="transformer_engine", cp=2)
    half = change_run(run, model=dataclasses.replace(run.model, seq_length=16), cp=1)
    (ours,) = estimate_ranks(run)
    (shorter,) = estimate_ranks(change_run(half, dp=2))
    assert ours.parts == shorter.parts and run.layout.world_size == 2
    with pytest.raises(ValueError, match="leave it out"):
        estimate_ranks(change_run(run, stock="local"))


def test_a_layer_of_experts_that_is_recomputed_keeps_its_input() -> None:
    tokens, f = 32, 96
    experts = {"num_experts": 4, "moe_ffn_hidden_size": f, "moe_shared_expert_intermediate_size": 48}
    model = make_shape(**SMALL, activation="swiglu", add_bias_linear=False, **experts)
    run = build_run(model=model, tempo=OFF, stock="transformer_engine", dispatcher="alltoall", moe_grouped_gemm=True)

    def keep(**values: Any) -> int:
        return keep_of_middle_layer(simulate_chunk(change_run(run, **values), range(8)))

    kept = keep()
    # Of a layer with experts MLP is none, and the shared experts' gate, up and their product are recomputed.
    assert keep(recompute=("mlp",)) == kept
    assert kept - keep(recompute=("shared_experts",)) == 2 * tokens * 48 * 3
    narrow = keep(recompute=("moe",), moe_ffn_hidden_size=f // 2)
    assert keep(recompute=("moe",)) == narrow < kept - 2 * tokens * 2 * f * 3


def test_multi_token_prediction_may_precede_the_head() -> None:
    """In chunks Etttt, tttt, mm, L: as beside the head, but for what passes between the last two."""
    s, h, v = 32, 64, 512
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 96, "moe_layer_freq": "([0]*7+[1])"}
    model = make_shape(**SMALL | {"vocab_size": v, "position_embedding_type": "rope"}, **experts)
    run = build_run(
        model=model, tempo=OFF, stock="transformer_engine", pp=2, mtp_num_layers=2,
        chunks=(4, 4, 0, 0), num_micro_batches=2, moe_grouped_gemm=True,
    )  # fmt: skip
    apart = dataclasses.replace(run, mtp_precedes_head=True)

    def find(run: Run) -> list[ChunkMemory]:
        # The last layer is Megatron's and so are those of further tokens, with experts.
        places = [(stage, place) for place in range(2) for stage in range(2)]
        return [simulate_chunk(run, run.list_chunks(i)[k], **run.list_ends(i)[k]) for i, k in places]

    beside, found = find(run), find(apart)
    assert found[:2] == beside[:2] and count_expert_parameters(found[2]) == count_expert_parameters(beside[3]) > 0
    # The stage with multi-token prediction has a copy of the embedding, that with the head one of its weight.
    assert found[3].num_parameters == v * h == beside[3].num_parameters - found[2].num_parameters
    # Hidden states of each token, and of two further ones.
    hidden = 2 * s * h
    assert [chunk.input_bytes for chunk in found] == [0, hidden, hidden, 3 * hidden]
    assert [chunk.output_bytes for chunk in found] == [hidden, hidden, 3 * hidden, 0]
    assert 0 < found[2].kept_bytes < beside[3].kept_bytes
    # The head's chunk has a copy of its input, as it has no layers, and a rotary table as long as that.
    more = found[2].kept_bytes + found[3].kept_bytes - beside[3].kept_bytes
    assert more == 3 * hidden + 3 * 4 * s * model.kv_channels
    estimates = estimate_ranks(apart)
    assert [each.num_parameters for each in estimates] == [
        sum(found[place].num_parameters for place in (stage, stage + 2)) for stage in range(2)
    ]


def test_with_offload_the_first_of_two_stages_has_two_micro_batches_on_the_host() -> None:
    sizes: Any = {"model": make_shape(**SMALL), "pp": 2, "num_micro_batches": 4, "micro_batch_size": 8}
    sent, kept = (estimate_ranks(build_run(**sizes, tempo=TempoConfig(offload=rows))) for rows in ("all", "off"))
    assert sent[0].host_bytes == 2 * sent[1].host_bytes > 0
    # One micro batch's is on its way back when the peak is reached; of the other nothing is left on the GPU.
    assert 0 < kept[0].peak_bytes - sent[0].peak_bytes <= sent[0].host_bytes


@pytest.mark.slow
def test_the_command_says_what_fits_and_what_does_not(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    command = ["estimate", "--model", "configs/model/gpt2_124m.json", "--micro-batch-size", "8", "--use-tempo"]
    plot, figures = tmp_path / "estimate.png", tmp_path / "estimate.json"
    assert main([*command, "--gpu-memory", "6GiB", "--plot", str(plot), "--json", str(figures)]) == 0
    out = capsys.readouterr().out
    assert "stock does not fit 6.00 GiB: all ranks needs" in out and "Tempo fits 6.00 GiB with" in out
    assert out.count("counting tensors, not what the allocator reserves") == 2
    assert plot.read_bytes()[:4] == b"\x89PNG"
    rows = json.loads(figures.read_text())["tempo"][0]
    assert rows["peak_bytes"] == sum(rows["bytes_at_the_peak"].values())
    for row in ("weights", "optimizer states", "activations of the layers", "made and freed at the peak"):
        assert f"{row} " in out and rows["bytes_at_the_peak"][row] > 0
    assert main([*command, "--gpu-memory", "1GiB"]) == 1


def test_what_the_allocator_reserves_decides_whether_a_run_fits(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    command = ["estimate", "--model", "configs/model/gpt2_tiny.json", "--optimizer", "none", "--allocator"]
    assert main([*command, "--gpu-memory", "1GiB", "--json", str(tmp_path / "figures.json")]) == 0
    out = capsys.readouterr().out
    rank = json.loads((tmp_path / "figures.json").read_text())["stock"][0]
    above = rank["reserved_bytes"] - rank["peak_bytes"]
    assert above > 0 and f"by what the allocator reserves, {format_bytes(above)} above its tensors" in out
    assert f"stock fits 1.00 GiB with {format_bytes(2**30 - rank['reserved_bytes'])} to spare" in out
    assert "allocated, rounded" in out and "reserved by the allocator" in out


def write_deepspeed(path: Path, **config: Any) -> str:
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("config", "arguments", "dtype"),
    [
        ("zero2_bf16.json", ["--zero", "2"], "bf16"),
        ("zero1_fp16.json", ["--dtype", "fp16"], "fp16"),
        ({"bf16": {"enabled": "auto"}}, ["--dtype", "bf16"], "bf16"),
        ({"bf16": {"enabled": "auto"}}, [], "fp32"),
    ],
)
def test_precision_and_zero_stage_are_the_deepspeed_jsons(
    config: Any, arguments: list[str], dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_written = isinstance(config, dict)
    file = write_deepspeed(tmp_path / "zero.json", **config) if is_written else f"configs/deepspeed/{config}"
    command = ["estimate", "--model", "configs/model/gpt2_tiny.json", "--deepspeed_config", file, *arguments]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"gpt2_tiny, {dtype}, s ")
    assert is_written or f"DeepSpeed ZeRO {config[4]}" in out


def test_batch_sizes_are_the_deepspeed_jsons(tmp_path: Path) -> None:
    file, figures = tmp_path / "zero.json", tmp_path / "figures.json"
    sizes = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 24, "gradient_accumulation_steps": "auto"}
    write_deepspeed(file, **sizes)
    arguments = ["--model", "configs/model/gpt2_tiny.json", "--deepspeed_config", str(file), "--dp", "3"]
    assert main(["estimate", *arguments, "--json", str(figures)]) == 0
    taken = json.loads(figures.read_text())["arguments"]
    assert (taken["micro_batch_size"], taken["num_micro_batches"], taken["dtype"]) == (2, 4, "fp32")
