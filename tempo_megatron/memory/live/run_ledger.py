"""Measures what the first micro batch of a user's run keeps, on this rank, while it trains.

The run is not changed, and its losses are the same bit for bit: during forward only the running module is noted, and
what autograd holds is read from the graph of the outputs afterwards.
"""

from __future__ import annotations

import contextlib
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


class RunObserver:
    """Looks at the first two steps of a run, on the first rank of each pipeline stage.

    Args:
        models: the model chunks of this rank, perhaps wrapped (DeepSpeed's engine, Megatron's DDP).
        prefix: the files are PREFIX.stageN.json and .png.
        micro_batch_size, seq_length, decoder_seq_length: b and s; only a T5's decoder has a length of its own.
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
        self._by_layer: _ByLayer = {}
        self._rest: list[SavedStorage] = []
        self._seen: list[Any] = []
        self._running = contextlib.ExitStack()
        self._scopes: Scopes | None = None
        # Storages of gradients and of states, at the first step of every optimizer. What else an optimizer steps, such
        # as float32 copies, counts as its states.
        self._gradients: dict[int, int] = {}
        self._states: dict[int, int] = {}
        self._stage, self._num_steps = int(parallel_state.get_pipeline_model_parallel_rank()), 0
        of_data = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        if parallel_state.get_tensor_model_parallel_rank() or of_data:
            self._num_steps = 2
            return
        self._hooks: list[Any] = [
            register_optimizer_step_pre_hook(self._note_gradients),
            register_optimizer_step_post_hook(self._note_states),
            *(model.register_forward_pre_hook(self._begin, with_kwargs=True) for model in self._models),
            *(model.register_forward_hook(self._end, always_call=True) for model in self._models),
        ]

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Enter this around each training step."""
        self._num_steps += 1
        # In the second one the optimizer's states are known.
        with self._follow_step() if self._num_steps == 2 else contextlib.nullcontext():
            yield
        if self._num_steps == 1:
            self._publish()

    def _list_weights(self) -> list[Tensor]:
        return [parameter for model in self._models for parameter in model.parameters()]

    def _note_gradients(self, optimizer: Any, *_: Any) -> None:
        weights = [*self._list_weights(), *_list_stepped(optimizer)]
        grads = [getattr(p, name, None) for p in weights for name in ("grad", "main_grad")]
        self._gradients |= list_storages(filter(torch.is_tensor, grads))

    def _note_states(self, optimizer: Any, *_: Any) -> None:
        weights = list_storages(self._list_weights())
        remembered = [value for state in optimizer.state.values() for value in state.values()]
        found = list_storages(filter(torch.is_tensor, [*_list_stepped(optimizer), *remembered]))
        self._states |= {key: size for key, size in found.items() if key not in weights}

    def _begin(self, model: Any, args: Any, keywords: Any) -> None:
        if not (model.training and torch.is_grad_enabled()) or model in self._seen:
            return
        self._scopes = Scopes(model, exclude=filter(torch.is_tensor, tree_leaves((args, keywords))))
        self._running.enter_context(self._scopes.follow())

    def _end(self, model: Any, _: Any, output: Any) -> None:
        self._running.close()
        if self._scopes is not None and output is not None:
            self._seen.append(model)
            saved = self._scopes.list_saved(filter(torch.is_tensor, tree_leaves(output)))
            of_layers, rest = divide_by_layer(saved, model.config)
            self._rest += rest
            for stack in STACKS:
                for place, layer in enumerate(getattr(getattr(model, stack, None), "layers", ())):
                    if kept := [*of_layers.get((stack, place), ()), *self._list_moved(layer, stack, place)]:
                        self._by_layer[stack, layer.layer_number - 1] = kept
        self._scopes = None

    def _list_moved(self, layer: Any, stack: str, place: int) -> Iterator[SavedStorage]:
        """What a layer has moved to the host in this forward."""
        for unit in () if self._engine is None else self._engine.last_moved.get(layer, ()):
            name = stack if unit.name == INPUT else f"{stack}.layers.{place}.{unit.name}".rstrip(".")
            yield SavedStorage(name, unit.num_bytes, unit.dtype, unit.shape, is_on_host=True)

    def _publish(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if not self._seen:
            print("--tempo-ledger: no model of this rank ran forward in training in the first step", flush=True)
            return
        config, (stock, stock_unknown) = self._models[0].config, self._find_stock()
        activation = describe_activation(config)
        standing = {WEIGHTS: list_storages(self._list_weights()), STATES: self._states, GRADIENTS: self._gradients}
        kinds = [*_list_kinds(self._by_layer, self._lengths, activation)]
        outside = sum_rows(self._rest, self._lengths, activation)
        found: dict[str, Any] = {
            "title": self._write_title(),
            "stage": self._stage,
            "sbh_bytes": self._seq_length * self._micro_batch_size * config.hidden_size,
            "layers": [_describe_kind(kind) for kind in kinds],
            "outside": {row.operation: row.num_bytes for row in outside},
            "standing": {kind: sum(storages.values()) for kind, storages in standing.items()},
            "stock": stock,
            "stock_unknown": stock_unknown,
            "host_pool_bytes": self._engine.pool.num_bytes if self._engine else 0,
            "most_moving_bytes": self._engine.peak_device_bytes if self._engine else 0,
            "kept_bytes": sum(each.num_bytes for each in outside) + sum(k.num_layers * k.layer_bytes for k in kinds),
        }
        # A stock layer first.
        bars: dict[str, Mapping[str, int]] = {"stock": stock} if stock else {}
        for kind in kinds:
            bars["this run" if len(kinds) == 1 else f"layers\n{kind.layers}"] = list_parts(kind.rows)
        of_model, name = {"this run": list_parts(outside)}, f"{self._prefix}.stage{self._stage}"
        report = _begin_report(name, found["title"], _format_measured(found, kinds), found)
        plot_kept(bars, of_model, f"{name}.png", found["title"], found["sbh_bytes"])
        add_kept(report, bars, of_model)
        report.save(f"{name}.html")
        print(f"the ledger is in {name}.json, .png and .html", flush=True)

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
        dtype = str(config.params_dtype).removeprefix("torch.")
        layout = f"TP {config.tensor_model_parallel_size}{' + SP' if config.sequence_parallel else ''}"
        sizes = f"hidden {config.hidden_size}, {dtype}, s {self._seq_length}, b {self._micro_batch_size}"
        return f"{name}, {config.num_layers} layers, {sizes}, {layout}"

    @contextlib.contextmanager
    def _follow_step(self) -> Iterator[None]:
        """Follows a step, and publishes its timeline."""
        lasting, engine = {WEIGHTS: list_storages(self._list_weights()), STATES: self._states}, self._engine
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
        name = f"{self._prefix}.stage{self._stage}.timeline"
        report = _begin_report(name, timeline.title, format_timeline(timeline), describe_timeline(timeline))
        plot_timeline(timeline, f"{name}.png")
        add_timeline(report, timeline)
        report.save(f"{name}.html")
        write_trace(timeline, f"{name}.trace.json")
        write_snapshot(timeline, f"{name}.snapshot.pickle")
        print(
            f"the step's memory is in {name}.json, .png and .html, in {name}.trace.json for ui.perfetto.dev, and in "
            f"{name}.snapshot.pickle for pytorch.org/memory_viz",
            flush=True,
        )


def _begin_report(name: str, title: str, table: str, record: dict[str, Any]) -> HtmlReport:
    """Prints a table, writes its figures to NAME.json, whose folder is made where it is missing, and begins a page."""
    print(table, flush=True)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    report = HtmlReport(title, "--tempo-ledger")
    report.add_text(table)
    return report


def _list_stepped(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


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


def _describe_kind(kind: LayerKind) -> dict[str, Any]:
    return {
        "layers": kind.layers,
        "num_layers": kind.num_layers,
        "num_bytes": kind.layer_bytes,
        "rows": {row.operation: row.num_bytes for row in kind.rows},
        "host_bytes": kind.host_bytes,
        "rows_on_host": {row.operation: row.host_bytes for row in kind.rows if row.host_bytes},
    }


def _format_measured(found: Mapping[str, Any], kinds: Sequence[LayerKind]) -> str:
    """The table of what a run keeps, of what goes into the JSON."""
    stock, outside = found["stock"], found["outside"]
    lines = [
        f"ledger of this run's first micro batch, stage {found['stage']}: {found['title']}",
        f"{'kept for backward by':<{_WIDTH}}{'bytes':>17}{'sbh':>11}{'stock':>19}",
    ]
    rule = "-" * len(lines[-1])

    def write(name: str, num_bytes: int, stock_bytes: int | None = None) -> str:
        beside = "" if stock_bytes is None else f"{format_size(stock_bytes):>19}"
        return f"{name:<{_WIDTH}}{format_size(num_bytes):>17}{num_bytes / found['sbh_bytes']:>11.3f}{beside}"

    for kind in kinds:
        lines.append(rule)
        if len(kinds) > 1:
            lines.append(f"layers {kind.layers}")
        kept = {row.operation: row.num_bytes for row in kind.rows}
        lines += [write(name, kept.get(name, 0), stock.get(name)) for name in {**kept, **stock}]
        lines.append(write(f"each of layers {kind.layers}", kind.layer_bytes, sum(stock.values()) or None))
    lines += [rule, *(write(name, num_bytes) for name, num_bytes in outside.items()), rule]
    lines.append(write(f"this rank, {sum(kind.num_layers for kind in kinds)} layers", found["kept_bytes"]))
    if on_host := format_host(kinds, _WIDTH):
        lines += [rule, *on_host]
        lines.append(f"{'all micro batches, memory taken':<{_WIDTH}}{format_size(found['host_pool_bytes']):>17}")
        lines += [f"{'on the device while it moves':<{_WIDTH}}{format_size(found['most_moving_bytes']):>17}", rule]
    lines += [f"{name:<{_WIDTH}}{format_size(num_bytes):>17}" for name, num_bytes in found["standing"].items()]
    if found["stock_unknown"]:
        lines.append(f"no column of stock: {found['stock_unknown']}")
    return "\n".join(lines)
