"""Measures what the first micro batch of a user's run keeps, on this rank, while it trains.

The run is not changed, and its losses are the same bit for bit: during forward only the running module is noted, and
what autograd holds is read from the graph of the outputs afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from tempo_kernels.offload import Engine
from tempo_megatron.beside import Beside
from tempo_megatron.html_report import HtmlReport
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.show.plots import add_kept, add_timeline, list_parts, plot_kept, plot_timeline
from tempo_megatron.memory.show.timeline import (
    GRADIENTS,
    STATES,
    WEIGHTS,
    describe_timeline,
    format_timeline,
    read_timeline,
)
from tempo_megatron.memory.show.viewers import write_snapshot, write_trace
from tempo_megatron.memory.tape.follower import Follower, list_storages
from tempo_megatron.memory.tape.rows import LayerKind, Row, divide_by_layer, format_host, format_size, sum_rows
from tempo_megatron.memory.tape.scopes import SavedStorage, Scopes
from tempo_megatron.settings.layer_values import write_layers
from tempo_megatron.settings.operations import INPUT, STACKS
from tempo_megatron.slots.mlp import describe_activation

_WIDTH = 34
_ByLayer = dict[tuple[str, int], list[SavedStorage]]
"""(stack, number of the layer from 0 over the whole model) -> what it keeps."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one rank keeps."""

    title: str
    stage: int
    sbh_bytes: int
    """s * b * h of the run."""
    layers: tuple[LayerKind, ...]
    outside: tuple[Row, ...]
    """What the model keeps around its layers."""
    standing: dict[str, int]
    """Weights, gradients and optimizer states -> bytes."""
    stock: dict[str, int]
    """Operation -> bytes of a stock layer of the same shape; empty where it cannot be measured."""
    stock_unknown: str
    """Why a stock layer cannot be measured."""
    host_pool_bytes: int = 0
    """What offload has taken of the host's memory."""
    most_moving_bytes: int = 0
    """The most that was on the device at once of what it moves."""

    @property
    def kept_bytes(self) -> int:
        kept = sum(kind.num_layers * kind.layer_bytes for kind in self.layers)
        return kept + sum(row.num_bytes for row in self.outside)


class RunObserver:
    """Looks at the first two steps of a run, on the first rank of each pipeline stage.

    Args:
        models: the model chunks of this rank, perhaps wrapped (DeepSpeed's engine, Megatron's DDP).
        prefix: the files are PREFIX.stageN.json and .png.
        micro_batch_size: b.
        seq_length, decoder_seq_length: tokens of a sample; only a T5's decoder has a length of its own.
        read_run: returns the Run of one of the models, which must be right for its layers only. It raises ValueError
            where the estimate does not know them.
        engine: moves what layers keep to the host; None where nothing does.
    """

    def __init__(
        self,
        models: Sequence[Any],
        prefix: str,
        micro_batch_size: int,
        seq_length: int,
        read_run: Callable[[Any], Run],
        decoder_seq_length: int | None = None,
        engine: Engine | None = None,
    ) -> None:
        self._models, self._prefix = [_unwrap(model) for model in models], prefix
        self._micro_batch_size, self._seq_length = micro_batch_size, seq_length
        self._lengths = {seq_length, decoder_seq_length or seq_length}
        self._read_run, self._engine = read_run, engine
        self._saved: dict[int, list[SavedStorage]] = {}
        self._moved: _ByLayer = {}
        self._running = contextlib.ExitStack()
        self._scopes: Scopes | None = None
        # Storages of gradients and of states, at the first step of every optimizer. What else an optimizer steps, such
        # as float32 copies, counts as its states.
        self._gradients: dict[int, int] = {}
        self._states: dict[int, int] = {}
        self._num_steps, self._hooks = 0, list[Any]()
        if parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_data_parallel_rank(
            with_context_parallel=True
        ):
            self._num_steps = 2
            return
        self._hooks += [
            register_optimizer_step_pre_hook(self._note_gradients),
            register_optimizer_step_post_hook(self._note_states),
        ]
        for place, model in enumerate(self._models):
            self._hooks.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._hooks.append(model.register_forward_hook(functools.partial(self._end, place), always_call=True))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Enter this around each training step."""
        self._num_steps += 1
        if self._num_steps == 2:
            # So that the optimizer's states are known.
            with self._follow_step():
                yield
            return
        yield
        if self._num_steps == 1:
            self._publish(self._measure())

    def _list_parameters(self) -> list[Tensor]:
        return [parameter for model in self._models for parameter in model.parameters()]

    def _note_gradients(self, optimizer: Any, *_: Any) -> None:
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [getattr(p, name, None) for p in (*self._list_parameters(), *stepped) for name in ("grad", "main_grad")]
        self._gradients |= list_storages(grad for grad in grads if isinstance(grad, Tensor))

    def _note_states(self, optimizer: Any, *_: Any) -> None:
        weights = list_storages(self._list_parameters())
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        remembered = [value for state in optimizer.state.values() for value in state.values()]
        found = list_storages(t for t in (*stepped, *remembered) if isinstance(t, Tensor))
        self._states |= {key: size for key, size in found.items() if key not in weights}

    def _begin(self, model: Any, args: Any, keywords: Any) -> None:
        if not (model.training and torch.is_grad_enabled()) or self._models.index(model) in self._saved:
            return
        self._scopes = Scopes(model, exclude=(t for t in tree_leaves((args, keywords)) if isinstance(t, Tensor)))
        self._running.enter_context(self._scopes.follow())

    def _end(self, place: int, _: Any, __: Any, output: Any) -> None:
        self._running.close()
        if self._scopes is not None and output is not None:
            self._saved[place] = self._scopes.list_saved(t for t in tree_leaves(output) if isinstance(t, Tensor))
            self._note_moved(self._models[place])
        self._scopes = None

    def _note_moved(self, model: Any) -> None:
        """Note what the layers of a model have moved to the host in this forward."""
        if self._engine is None:
            return
        for stack in STACKS:
            for place, layer in enumerate(getattr(getattr(model, stack, None), "layers", ())):
                self._moved[stack, layer.layer_number - 1] = [
                    SavedStorage(
                        stack if unit.name == INPUT else f"{stack}.layers.{place}.{unit.name}".rstrip("."),
                        unit.num_bytes,
                        unit.dtype,
                        unit.shape,
                        is_on_host=True,
                    )
                    for unit in self._engine.last_moved.get(layer, ())
                ]

    def _measure(self) -> Measured | None:
        """What was found; None if no model of this rank ran forward in training."""
        for hook in self._hooks:
            hook.remove()
        if not self._saved:
            return None
        config = self._models[0].config
        activation = describe_activation(config)
        by_layer, rest = self._divide()
        stock, stock_unknown = self._find_stock()
        standing = {**self._list_lasting(), GRADIENTS: self._gradients}
        return Measured(
            title=self._write_title(),
            stage=_get_stage(),
            sbh_bytes=self._seq_length * self._micro_batch_size * config.hidden_size,
            layers=tuple(_list_kinds(by_layer, self._lengths, activation)),
            outside=sum_rows(rest, self._lengths, activation),
            standing={kind: sum(storages.values()) for kind, storages in standing.items()},
            stock=stock,
            stock_unknown=stock_unknown,
            host_pool_bytes=self._engine.pool.num_bytes if self._engine else 0,
            most_moving_bytes=self._engine.peak_device_bytes if self._engine else 0,
        )

    def _list_lasting(self) -> dict[str, dict[int, int]]:
        """The storages of weights and states, as list_storages returns them."""
        return {WEIGHTS: list_storages(self._list_parameters()), STATES: self._states}

    def _divide(self) -> tuple[_ByLayer, list[SavedStorage]]:
        """The storages of each layer, and those of no layer."""
        by_layer: _ByLayer = {}
        rest = []
        for place, saved in self._saved.items():
            model = self._models[place]
            of_layers, others = divide_by_layer(saved, model.config)
            rest += others
            for (stack, layer), storages in of_layers.items():
                by_layer[stack, getattr(model, stack).layers[layer].layer_number - 1] = storages
        for key, moved in self._moved.items():
            if moved:
                by_layer[key] = [*by_layer.get(key, ()), *moved]
        return by_layer, rest

    def _find_stock(self) -> tuple[dict[str, int], str]:
        """The rows of one stock layer, measured in a separate process; or no rows, and why."""
        model = self._models[0]
        if sum(hasattr(model, stack) for stack in STACKS) > 1:
            return {}, "the model has two stacks of layers"
        try:
            run = self._read_run(model)
            if run.model.num_experts is not None and not all(run.model.layers_with_experts):
                return {}, "some layers have experts and others not"
            return dict(Beside("tempo_megatron.memory.plan.choices:measure_stock_layer", run).wait()), ""
        except ValueError as error:
            return {}, str(error)

    def _write_title(self) -> str:
        """`GPTModel, 24 layers, hidden 1024, bfloat16, s 1024, b 4, TP 2 + SP`."""
        config = self._models[0].config
        name = type(self._models[0]).__name__.removeprefix("Tempo").removeprefix("Fused")
        layout = f"TP {config.tensor_model_parallel_size}{' + SP' if config.sequence_parallel else ''}"
        return (
            f"{name}, {config.num_layers} layers, hidden {config.hidden_size}, "
            f"{str(config.params_dtype).removeprefix('torch.')}, s {self._seq_length}, b {self._micro_batch_size}, "
            f"{layout}"
        )

    @contextlib.contextmanager
    def _follow_step(self) -> Iterator[None]:
        """Follow a step, and publish its timeline."""
        lasting, engine = self._list_lasting(), self._engine
        with Follower(
            *(buffer for model in self._models for buffer in model.buffers()),
            known_storages=(key for storages in lasting.values() for key in storages),
            scopes=Scopes(*self._models),
            count_host=None if engine is None else lambda: engine.pool.num_bytes_in_use,
        ) as seen:
            yield
        standing = {kind: sum(storages.values()) for kind, storages in lasting.items()}
        activation = describe_activation(self._models[0].config)
        timeline = read_timeline(seen.tape, standing, activation=activation, title=self._write_title())
        print(table := format_timeline(timeline), flush=True)
        name = f"{self._prefix}.stage{_get_stage()}.timeline"
        _write_json(describe_timeline(timeline), f"{name}.json")
        plot_timeline(timeline, f"{name}.png")
        report = HtmlReport(timeline.title, "--tempo-ledger")
        report.add_text(table)
        add_timeline(report, timeline)
        report.save(f"{name}.html")
        write_trace(timeline, f"{name}.trace.json")
        write_snapshot(timeline, f"{name}.snapshot.pickle")
        print(
            f"the step's memory is in {name}.json, .png and .html, in {name}.trace.json for ui.perfetto.dev, and in "
            f"{name}.snapshot.pickle for pytorch.org/memory_viz",
            flush=True,
        )

    def _publish(self, found: Measured | None) -> None:
        if found is None:
            print("--tempo-ledger: no model of this rank ran forward in training in the first step", flush=True)
            return
        print(table := _format_measured(found), flush=True)
        name = f"{self._prefix}.stage{found.stage}"
        _write_json(_describe_measured(found), f"{name}.json")
        # A stock layer first.
        layers: dict[str, Mapping[str, int]] = {"stock": found.stock} if found.stock else {}
        for kind in found.layers:
            label = "this run" if len(found.layers) == 1 else f"layers\n{kind.layers}"
            layers[label] = list_parts(kind.rows)
        outside = {"this run": list_parts(found.outside)}
        plot_kept(layers, outside, f"{name}.png", found.title, found.sbh_bytes)
        report = HtmlReport(found.title, "--tempo-ledger")
        report.add_text(table)
        add_kept(report, layers, outside)
        report.save(f"{name}.html")
        print(f"the ledger is in {name}.json, .png and .html", flush=True)


def _list_kinds(by_layer: _ByLayer, lengths: set[int], activation: str) -> Iterator[LayerKind]:
    has_two_stacks = len({stack for stack, _ in by_layer}) > 1
    kinds: dict[tuple[str, tuple[Row, ...]], list[int]] = {}
    for (stack, number), storages in sorted(by_layer.items()):
        kinds.setdefault((stack, sum_rows(storages, lengths, activation)), []).append(number)
    for (stack, rows), numbers in kinds.items():
        yield LayerKind((f"{stack} " if has_two_stacks else "") + write_layers(numbers), len(numbers), rows)


def _unwrap(model: Any) -> Any:
    """The Megatron model inside of wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _get_stage() -> int:
    return int(parallel_state.get_pipeline_model_parallel_rank())


def _format_measured(found: Measured) -> str:
    """The table of what a run keeps."""
    lines = [
        f"ledger of this run's first micro batch, stage {found.stage}: {found.title}",
        f"{'kept for backward by':<{_WIDTH}}{'bytes':>17}{'sbh':>11}{'stock':>19}",
    ]
    rule = "-" * len(lines[-1])

    def write(name: str, num_bytes: int, stock_bytes: int | None = None) -> str:
        beside = "" if stock_bytes is None else f"{format_size(stock_bytes):>19}"
        return f"{name:<{_WIDTH}}{format_size(num_bytes):>17}{num_bytes / found.sbh_bytes:>11.3f}{beside}"

    for kind in found.layers:
        lines.append(rule)
        if len(found.layers) > 1:
            lines.append(f"layers {kind.layers}")
        names = [row.operation for row in kind.rows]
        lines += [write(row.operation, row.num_bytes, found.stock.get(row.operation)) for row in kind.rows]
        lines += [write(name, 0, num_bytes) for name, num_bytes in found.stock.items() if name not in names]
        lines.append(write(f"each of layers {kind.layers}", kind.layer_bytes, sum(found.stock.values()) or None))
    lines += [rule, *(write(row.operation, row.num_bytes) for row in found.outside), rule]
    num_layers = sum(kind.num_layers for kind in found.layers)
    lines.append(write(f"this rank, {num_layers} layers", found.kept_bytes))
    if on_host := format_host(found.layers, _WIDTH):
        lines += [rule, *on_host]
        lines.append(f"{'all micro batches, memory taken':<{_WIDTH}}{format_size(found.host_pool_bytes):>17}")
        lines += [f"{'on the device while it moves':<{_WIDTH}}{format_size(found.most_moving_bytes):>17}", rule]
    lines += [f"{name:<{_WIDTH}}{format_size(num_bytes):>17}" for name, num_bytes in found.standing.items()]
    if found.stock_unknown:
        lines.append(f"no column of stock: {found.stock_unknown}")
    return "\n".join(lines)


def _describe_measured(found: Measured) -> dict[str, Any]:
    """What goes into the JSON."""
    return {
        **dataclasses.asdict(found),
        "layers": [
            {"layers": kind.layers, "num_layers": kind.num_layers, "num_bytes": kind.layer_bytes}
            | {"rows": {row.operation: row.num_bytes for row in kind.rows}, "host_bytes": kind.host_bytes}
            | {"rows_on_host": {row.operation: row.host_bytes for row in kind.rows if row.host_bytes}}
            for kind in found.layers
        ],
        "outside": {row.operation: row.num_bytes for row in found.outside},
        "kept_bytes": found.kept_bytes,
    }


def _write_json(content: dict[str, Any], file: str | Path) -> None:
    """Write a JSON file; its folder is made where it is missing."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
