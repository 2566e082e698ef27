"""The backend of torch.compile that orders Inductor's kernels: the same bits, less memory where there is an order."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
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
from tempo_megatron.roam.graph import Operation, StepGraph, count_bytes
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


def run_without_gradients(backend: str) -> tuple[tuple[Tensor, ...], int]:
    model, x = torch.compile(Trap(), backend=backend), torch.randn(ROWS, 4 * UNIT)
    with torch.no_grad():
        model(x)
        return measure_allocated(lambda: model(x))


@pytest.mark.slow
def test_an_order_that_list_schedules_miss_is_run_and_saves_what_it_says() -> None:
    torch.manual_seed(2)
    expected, before = run_without_gradients("inductor")
    torch._dynamo.reset()
    torch.manual_seed(2)
    found, after = run_without_gradients(inductor.NAME)
    assert all(map(torch.equal, found, expected))
    column = ROWS * UNIT * 4
    assert (before, after) == (32 * column, 17 * column)


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


@pytest.fixture
def compiles_anew() -> Iterator[None]:
    """What was compiled before would be ordered no more. pytest's monkeypatch would delete the settings in the end."""
    inductors, functorchs = torch._inductor.config, torch._functorch.config
    with inductors.patch(fx_graph_cache=False), functorchs.patch(enable_autograd_cache=False):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("compiles_anew")
def test_training_has_the_bits_of_inductor_and_no_higher_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our count of the order that Inductor gives is also Inductor's own, for the forward and the backward graph."""
    counted = list[tuple[int, int]]()
    order_nodes = inductor.order_nodes

    def compare(nodes: list[Any]) -> list[Any]:
        names = frozenset(V.graph.get_output_names())
        made = {buffer.get_name() for node in nodes for buffer in node.get_outputs()}
        inputs = {buffer.get_name(): buffer for node in nodes for buffer in node.mpi_node.pred_buffers}
        freed = {name: buffer for name, buffer in inputs.items() if name not in made}
        ours = max(count_bytes(inductor.read_nodes(nodes, names), range(len(nodes))))
        counted.append((ours, memory.estimate_peak_memory(nodes, freed, names)[0]))
        return order_nodes(nodes)

    monkeypatch.setattr(inductor, "order_nodes", compare)
    models, peaks = {}, {}
    for backend in ("inductor", inductor.NAME):
        torch._dynamo.reset()
        models[backend] = copy.deepcopy(Small())
        compiled = torch.compile(models[backend], backend=backend)

        def step(number: int, compiled: Any = compiled, model: nn.Module = models[backend]) -> Tensor:
            torch.manual_seed(number)
            model.zero_grad()
            loss: Tensor = compiled(torch.randn(128, 64))
            loss.backward()
            return loss.detach()

        losses = [step(0), step(1)]
        last, peaks[backend] = measure_allocated(lambda step=step: step(2))
        models[backend].losses = torch.stack([*losses, last])
    stock, ours = models["inductor"], models[inductor.NAME]
    assert torch.equal(ours.losses, stock.losses)
    for (name, expected), found in zip(stock.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad), name
    for (name, expected), found in zip(stock.named_buffers(), ours.buffers(), strict=True):
        assert torch.equal(found, expected), name
    assert len(counted) == 2 and all(ours == theirs for ours, theirs in counted)
    assert peaks[inductor.NAME] <= peaks["inductor"]


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
