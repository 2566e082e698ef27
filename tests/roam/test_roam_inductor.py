"""The backend of torch.compile that orders Inductor's kernels: the same bits, less memory where there is an order."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from allocated import measure_allocated
from inductor_orders import count_inductor_peak
from torch import Tensor, nn
from torch._dynamo.backends import registry
from torch._inductor import memory
from torch._inductor.virtualized import V

from tempo_megatron.roam import inductor
from tempo_megatron.roam.graph import Operation, StepGraph
from tempo_megatron.roam.order import find_order

ROWS, UNIT = 256, 64


@pytest.fixture(autouse=True)
def _register(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the installed package does, whatever is installed here."""
    text = (Path(__file__).parents[2] / "setup.py").read_text(encoding="utf-8")
    (entry,) = re.findall(r'"torch_dynamo_backends": \["(\w+) = ([\w.:]+)"\]', text)
    monkeypatch.setitem(registry._BACKENDS, entry[0], EntryPoint(*entry, "torch_dynamo_backends"))
    torch._dynamo.reset()


class Trap(nn.Module):
    """Four results of x, one of them through something wide. List schedules make what is small first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        widths = {"a": (4, 1), "b": (4, 2), "c": (4, 2), "wide": (4, 16), "d": (2, 12), "e": (2, 2), "f": (16, 1)}
        self.weights = nn.ParameterDict(
            {name: torch.randn(rows * UNIT, columns * UNIT) for name, (rows, columns) in widths.items()}
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        w = self.weights
        a, b, c, wide = x @ w["a"], x @ w["b"], x @ w["c"], x @ w["wide"]
        return a, c @ w["d"], b @ w["e"], wide @ w["f"]


@pytest.mark.slow
def test_an_order_that_list_schedules_miss_is_run_and_saves_what_it_says() -> None:
    found, peaks = [], []
    for backend in ("inductor", inductor.NAME):
        torch._dynamo.reset()
        model, x = torch.compile(Trap(), backend=backend), torch.randn(ROWS, 4 * UNIT)
        with torch.no_grad():
            model(x)
            results, peak = measure_allocated(lambda model=model, x=x: model(x))
        found.append(results)
        peaks.append(peak)
    assert all(map(torch.equal, *found))
    assert peaks == [32 * ROWS * UNIT * 4, 17 * ROWS * UNIT * 4]


class Small(nn.Module):
    """An MLP with a norm, dropout, a call of several results (sort) and a buffer that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.norm, self.down = nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64)
        self.batch_norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(self.norm(self.up(x)))
        y = nn.functional.dropout(self.batch_norm(self.down(y)), 0.1)
        values, places = torch.sort(self.head(y), dim=0)
        return (values * (places + 1)).square().mean()


@pytest.mark.slow
def test_training_has_the_bits_of_inductor_and_no_higher_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our count of the order that Inductor gives is also Inductor's own, for the forward and the backward graph."""
    counted = list[tuple[int, int]]()
    order_nodes = inductor.order_nodes

    def compare(nodes: list[Any]) -> list[Any]:
        names = frozenset(V.graph.get_output_names())
        made = {buffer.get_name() for node in nodes for buffer in node.get_outputs()}
        inputs = {buffer.get_name(): buffer for node in nodes for buffer in node.mpi_node.pred_buffers}
        freed = {name: buffer for name, buffer in inputs.items() if name not in made}
        ours = max(inductor.read_nodes(nodes, names).count_bytes(range(len(nodes))))
        counted.append((ours, memory.estimate_peak_memory(nodes, freed, names)[0]))
        return order_nodes(nodes)

    monkeypatch.setattr(inductor, "order_nodes", compare)
    results, peaks = list[list[Any]](), list[int]()
    # What was compiled before would be ordered no more. pytest's monkeypatch would delete the settings in the end.
    inductors, functorchs = torch._inductor.config, torch._functorch.config
    for backend in ("inductor", inductor.NAME):
        torch._dynamo.reset()
        model = Small()
        compiled = torch.compile(model, backend=backend)

        def step(number: int, compiled: Any = compiled, model: nn.Module = model) -> Tensor:
            torch.manual_seed(number)
            model.zero_grad()
            loss: Tensor = compiled(torch.randn(128, 64))
            loss.backward()
            return loss.detach()

        with inductors.patch(fx_graph_cache=False), functorchs.patch(enable_autograd_cache=False):
            losses = [step(0), step(1)]
            last, peak = measure_allocated(lambda step=step: step(2))
        peaks.append(peak)
        results.append([*losses, last, *(p.grad for p in model.parameters()), *model.buffers()])
    assert all(map(torch.equal, *results))
    assert len(counted) == 2 and all(ours == theirs for ours, theirs in counted)
    assert peaks[1] <= peaks[0]


def test_a_hook_that_is_taken_and_an_option_that_is_none_are_refused() -> None:
    options = {"_post_fusion_custom_pass": lambda nodes: nodes}
    with pytest.raises(ValueError, match='_post_fusion_custom_pass is set, through which the backend "tempo_order"'):
        inductor.compile_ordered(torch.fx.symbolic_trace(nn.ReLU()), [torch.ones(2)], options=options)
    with pytest.raises(RuntimeError, match="Unexpected optimization option no_such_option"):
        inductor.compile_ordered(torch.fx.symbolic_trace(nn.ReLU()), [torch.ones(2)], options={"no_such_option": 1})


def test_inductors_schedules_are_those_that_the_table_compares_with() -> None:
    """The graph of Trap by hand: its best list schedule needs what the compiled step did."""
    given = ((1, ()), (2, ()), (2, ()), (16, ()), (12, (2,)), (2, (1,)), (1, (3,)))
    operations = (Operation(name=f"mm{place}", makes=(place,), reads=reads) for place, (_, reads) in enumerate(given))
    graph = StepGraph(tuple(operations), tuple(size for size, _ in given), frozenset({0, 4, 5, 6}))
    assert (count_inductor_peak(graph), find_order(graph).peak_bytes) == (32, 17)
