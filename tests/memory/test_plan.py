"""The planner by the bytes of the witness: what it chooses, its bound, and blocks that a TempoConfig takes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from kept_formula import count_layer_bytes, count_stack_bytes, list_layer_rows, make_layer
from runs import build_run

from tempo_megatron import TempoConfig
from tempo_megatron.memory.plan.choices import (
    LayerChoice,
    LayerRows,
    Rows,
    Values,
    count_recomputed_flops,
)
from tempo_megatron.memory.plan.flops import count_layer_flops
from tempo_megatron.memory.plan.gpu import read_gpu
from tempo_megatron.memory.plan.planner import (
    MemoryPlan,
    NothingFitsError,
    Planner,
    PlanRequest,
)
from tempo_megatron.memory.plan.plots import list_switches
from tempo_megatron.memory.plan.search import count_peak, stack_options
from tempo_megatron.memory.tape.rows import Row
from tempo_megatron.models.shape import ModelShape
from tempo_megatron.models.shape import make_shape as complete_shape
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS
from tempo_megatron.words.argument_types import format_bytes

FIXED = 10**9


class FormulaRows(LayerRows):
    """Bytes that a layer keeps by the witness, which takes no time and knows Transformer Engine's modules."""

    def measure(self, recompute: frozenset[str], choices: Iterable[Values]) -> list[Rows]:
        run = dataclasses.replace(self._run, recompute=tuple(recompute))
        layer, stock = make_layer(run), {"stock": run.stock, "stock_attention": run.stock_attention}
        self._stack_bytes[recompute] = count_stack_bytes(layer, TempoConfig.off())
        configs = [make_config(each) for each in choices]
        return [
            tuple(Row(row.operation, row.num_bytes) for row in list_layer_rows(layer, config, **stock))
            for config in configs
        ]


def make_config(values: Values) -> TempoConfig:
    return dataclasses.replace(TempoConfig.off(), **dict(zip(LAYER_OPERATIONS, values, strict=True)))


class FormulaPlanner(Planner):
    measure = staticmethod(FormulaRows)


def make_shape(**sizes: Any) -> ModelShape:
    """A GPT: h 4096, s 2048, d 128."""
    return complete_shape(
        **{"num_layers": 12, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 2048, "vocab_size": 128}
        | sizes
    )


def make_request(num_layers: int = 12, **settings: Any) -> PlanRequest:
    shape = dataclasses.replace(settings.pop("shape", None) or make_shape(), num_layers=num_layers)
    of_request = {"gpu": read_gpu("h100")}
    of_request |= {name: settings.pop(name) for name in ("gpu", "recompute") if name in settings}
    run = build_run(**{"model": shape, "tempo": TempoConfig(), "stock": "transformer_engine", **settings})
    return PlanRequest(run=run, fixed_sizes=(FIXED,), **of_request)


LAYOUTS: dict[str, dict[str, Any]] = {
    "one stage": {},
    "4 stages, 2 micro batches": {"pp": 4, "num_micro_batches": 2},
    "local, 3 stages, TP 8 + SP": {"stock": "local", "pp": 3, "tp": 8, "sp": True},
    "without dropout": {"shape": make_shape(hidden_dropout=0.0, attention_dropout=0.0)},
    "grouped swiglu": {
        "shape": make_shape(
            activation="swiglu",
            ffn_hidden_size=16384,
            normalization="RMSNorm",
            position_embedding_type="rope",
            num_query_groups=8,
        ),
        "pp": 2,
    },
}


def read_recompute(plan: MemoryPlan, layer_in_stage: int) -> frozenset[str]:
    """What Megatron makes of a plan's words for one layer of a stage."""
    words = plan.megatron_arguments
    if not words:
        return frozenset()
    assert words[0] == "--recompute-granularity"
    if words[1] == "selective":
        assert words[2] == "--recompute-modules" and set(words[3:]) <= {"core_attn", "mlp"}
        return frozenset(words[3:])
    assert words[1:5] == ("full", "--recompute-method", "block", "--recompute-num-layers")
    return frozenset(("full",) if layer_in_stage < int(words[5]) else ())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_plan_fits_its_block_and_words_say_why_and_its_bound_is_below(layout: dict[str, Any]) -> None:
    planner = FormulaPlanner(make_request(**layout))
    run, switches = planner.request.run, list_switches(planner)
    assert {"stock", "Tempo, in place", "Tempo, recompute", "stock + core_attn", "stock + full"} <= set(switches)
    for name, switch in switches.items():
        plan = planner.plan(switch.peak_bytes)
        assert plan.peak_bytes <= switch.peak_bytes and plan.seconds <= switch.seconds * 1.005, name
    least, most = planner.make_smallest().peak_bytes, switches["stock"].peak_bytes
    seconds, bounds = [], []
    for budget in (least + (most - least) * index // 5 for index in range(6)):
        plan = planner.plan(budget)
        assert plan.peak_bytes <= budget and plan.gap_seconds >= 0
        seconds.append(plan.seconds)
        bounds.append(plan.seconds - plan.gap_seconds)
        kinds = {(choice.values, choice.offload) for stage in plan.stages for choice in stage.choices}
        assert len(kinds) <= 3 if run.layout.pp == 1 else 6
        config = TempoConfig.from_dict(plan.block)
        config.check_layers("decoder", run.model.num_layers)
        assert [layer for stage in plan.stages for layer in stage.layers] == list(range(run.model.num_layers))
        for stage in plan.stages:
            kept = 0
            for index, number in enumerate(stage.layers):
                recompute = read_recompute(plan, index)
                assert stage.choices[index].recompute == recompute
                layer = make_layer(dataclasses.replace(run, recompute=tuple(recompute)))
                of_layer = dataclasses.replace(config.for_layer(number), loss="off")
                assert of_layer == make_config(stage.choices[index].values)
                kept += count_layer_bytes(layer, of_layer, stock=run.stock, stock_attention=run.stock_attention)
            is_rotary = run.model.position_embedding_type == "rope"
            angles = 4 * 2048 * 128 if is_rotary and "full" in plan.megatron_arguments else 0
            assert stage.kept_bytes == kept + angles
            assert stage.peak_bytes >= FIXED + stage.in_flight * stage.kept_bytes
    assert bounds == sorted(bounds, reverse=True)
    assert all(later <= earlier * 1.005 for earlier, later in itertools.pairwise(seconds)) and seconds[0] > seconds[-1]


@pytest.mark.parametrize("stages", [1, 3])
def test_no_choice_of_any_kinds_is_shorter_than_the_bound(stages: int) -> None:
    """Of 3 layers on each stage all choices of all undominated options are tried."""
    planner = FormulaPlanner(make_request(3 * stages, pp=stages))
    least, most = planner.make_smallest().peak_bytes, list_switches(planner)["stock"].peak_bytes
    for budget in (least + (most - least) * index // 5 for index in range(1, 5)):
        best = math.inf
        for mode in planner._modes:
            for number, full in mode.ways:
                slowest = []
                for stage, fixed_bytes in zip(planner._stages, mode.fixed_bytes, strict=True):
                    ways = [
                        [*([option] * number), *others]
                        for option in (full if number else full[:1])
                        for others in itertools.combinations_with_replacement(mode.options, 3 - number)
                    ]
                    layers = [(1, stack_options(options)) for options in zip(*ways, strict=True)]
                    fits = fixed_bytes + count_peak(stage, layers[:number], layers[number:]) <= budget
                    seconds = stage.base_seconds + sum(options.seconds for _, options in layers)
                    slowest.append(np.min(seconds, where=fits, initial=math.inf))
                best = min(best, max(slowest))
        plan = planner.plan(budget)
        assert plan.seconds - plan.gap_seconds <= best * (1 + 1e-12)
        # A stage of 3 layers cannot mix finely; of 12 or more it is 0.5 %.
        assert plan.seconds <= 1.02 * best


def test_an_impossible_budget_says_by_how_much_and_names_the_nearest_plan() -> None:
    planner = FormulaPlanner(make_request(12))
    smallest = planner.make_smallest()
    with pytest.raises(NothingFitsError, match="a GPU may be filled") as error:
        planner.plan(FIXED)
    text = str(error.value)
    assert f", {format_bytes(smallest.peak_bytes - FIXED)} more: activation=" in text and "\n" not in text
    assert "--recompute-granularity full --recompute-method block --recompute-num-layers" in text
    assert error.value.least_bytes == smallest.peak_bytes
    assert planner.plan(smallest.peak_bytes).peak_bytes <= smallest.peak_bytes


def test_flops_are_those_of_the_products() -> None:
    s, h = 2048, 4096

    def count(shape: ModelShape | None = None, **fields: Any) -> Any:
        return count_layer_flops(build_run(model=shape or make_shape(), tempo=TempoConfig(), **fields))

    flops = count()
    # 24 s b h**2 + 4 s**2 b h of arXiv 2205.05198, with the MLP's two thirds of the first.
    assert flops.linears == 24 * s * h * h and flops.core_attention == 4 * s * s * h
    assert flops.mlp == 16 * s * h * h
    assert count(stock="transformer_engine").core_attention == 2 * s * (s + 1) * h
    halved = count(stock="transformer_engine", cp=2)
    assert (halved.core_attention, halved.linears) == (s * (s + 1) * h, flops.linears // 2)
    off, again = TempoConfig.off(), TempoConfig(attention="recompute", linear_fc1="recompute", linear_qkv="recompute")
    for config, modules, expected in (
        (off, (), 0),
        (off, ("core_attn", "mlp"), flops.core_attention + flops.mlp),
        (again, (), flops.core_attention + flops.linear_fc1 + flops.linear_qkv),
        (again, ("core_attn", "mlp"), flops.core_attention + flops.mlp + flops.linear_qkv),  # nothing a third time
        (again, ("full",), flops.total),
    ):
        values = tuple(getattr(config, name) for name in LAYER_OPERATIONS)
        assert count_recomputed_flops(flops, LayerChoice(values, frozenset(modules))) == expected
    shape = make_shape(activation="swiglu", num_query_groups=8, ffn_hidden_size=14336)
    llama = count(shape, tp=4)
    assert llama.mlp == 6 * s * h * 14336 // 4 and llama.linears - llama.mlp == 2 * s * h * (2 * h + 2 * 1024) // 4
    assert llama.linear_fc1 == 4 * s * h * 14336 // 4 and llama.linear_qkv == 2 * s * h * (h + 2 * 1024) // 4
    # Two of 4 experts and a shared one.
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 1024, "moe_shared_expert_intermediate_size": 2048}
    mixture = count(dataclasses.replace(shape, **experts))
    assert mixture.linear_fc2 == 2 * s * (h * 2048 + h * 2 * 1024) and mixture.router == 2 * s * h * 4


# sbh and share of linears that run again, of torch.compile 2.13's budgets, as measured: core attention runs again in
# each. It counts products only, so that these plans are for a GPU on which elementwise work takes no time.
COMPILED = {18.06: 0.0, 17.0: 0.042, 13.5: 0.188, 10.5: 0.312, 7.0: 0.458}
ROUNDING = 0.049
FREE = dataclasses.replace(read_gpu("h100"), bytes_per_second=1e30)


def test_no_more_linears_run_again_than_torch_compile_runs_for_the_same_bytes() -> None:
    """Its figures are rounded to 0.1 sbh and 0.1 %: any bytes that round to them may be kept, and our share is rounded
    too. What one layer makes again in backward, all of an MLP's linear or attention's output, is not kept."""
    request = make_request(160, gpu=FREE)
    elements, flops = 2048 * 4096 * 160, count_layer_flops(request.run)
    linears = flops._replace(core_attention=0)
    planner = FormulaPlanner(request, tolerance=0.0)
    for sbh, compiled in COMPILED.items():
        shares = []
        for made_again in (8.03, 2.03):
            (stage,) = planner.plan(FIXED + math.floor((sbh + ROUNDING + made_again / 160) * elements)).stages
            again = sum(count_recomputed_flops(linears, each) for each in stage.choices)
            if stage.kept_bytes <= (sbh + ROUNDING) * elements:
                shares.append(again / (160 * linears.total))
        assert round(min(shares), 3) <= compiled, sbh


def test_plenty_of_memory_leaves_stock_but_what_costs_nothing() -> None:
    plan = FormulaPlanner(make_request()).plan(10**15)
    operations = (*(field for field in plan.block if field != "loss"), "loss")
    assert plan.block == {**dict.fromkeys(operations, "off"), "dropout": "recompute"}
    assert plan.megatron_arguments == () and plan.stages[0].added_seconds == plan.gap_seconds == 0


def test_stages_share_the_layers_and_modes_are_what_megatron_may_recompute() -> None:
    with pytest.raises(ValueError, match="5 pipeline stages do not divide the model's 12 layers"):
        make_request(12, pp=5)
    assert make_request(12, recompute=frozenset({"mlp"})).list_modes() == [frozenset(), frozenset({"mlp"})]
    assert make_request(12, recompute=None).list_modes() == [frozenset()]
    assert len(make_request(12).list_modes()) == 5
