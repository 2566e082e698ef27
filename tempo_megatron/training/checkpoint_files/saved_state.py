"""Reads weights and moments of a checkpoint by parameter and range, whatever layout (TP, PP, DP, ZeRO) saved it.

Files are memory-mapped, and only the requested elements are read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tempo_megatron.training.checkpoint_files.files import name_rank_file, read_tensors
from tempo_megatron.training.checkpoint_files.folder import IMPORTED
from tempo_megatron.training.checkpoint_files.sharding import MOMENTS, Box, Cut, Fragment, overlap
from tempo_megatron.training.checkpoint_files.tensor_file import TensorFiles

WEIGHTS_FILE = "weights.safetensors"
"""The weights of a checkpoint that import has made, by Megatron's names; DeepSpeed has not written it."""


class SavedState:
    """The weights and moments that the ranks of a run wrote to the folder `checkpoint`.

    `saved` is the content of its run.json, `option` that by which the user has given it, for errors.

    Raises ValueError if a file is missing or damaged, or does not describe its rank's parts.
    """

    def __init__(self, checkpoint: Path, saved: Mapping[str, Any], option: str = "--load") -> None:
        self.checkpoint, self.zero_stage = checkpoint, int(saved["zero_stage"])
        self.where, self._is_imported = f"{option} {checkpoint}", IMPORTED in saved
        self.tp: int = saved["tensor_model_parallel_size"]
        # Without ZeRO the data-parallel ranks have equal states, and only the first one's are saved.
        self.dp: int = saved["data_parallel_size"] if self.zero_stage else 1
        self._read_content = functools.cache(self._read_uncached)
        pp: int = saved.get("pipeline_model_parallel_size", 1)  # import writes none
        self._model_parallel_ranks = range(self.tp * pp)
        # The pipeline stage of each parameter. The last one's copy of tied word embeddings is left out.
        self._stages: dict[str, int] = {}
        # For each tensor-parallel rank, by name, those of all stages.
        self.cuts: list[dict[str, Cut]] = [{} for _ in range(self.tp)]
        self._fragments: list[dict[str, list[tuple[int, Fragment]]]] = [{} for _ in range(self.tp)]
        # Stage by stage: the ranks of the first one come first.
        for rank in range(self.tp * saved["data_parallel_size"] * pp):
            described = read_tensors(checkpoint / name_rank_file(rank))["layout"]
            tp_rank, dp_rank, stage = described["tp_rank"], described["dp_rank"], described["pp_rank"]
            for name, cut in described["cuts"].items() if dp_rank == 0 else ():
                self.cuts[tp_rank].setdefault(name, Cut.unpack(cut))
            for packed in described["fragments"] if dp_rank < self.dp else ():
                fragment = Fragment(*packed)
                if self._stages.setdefault(fragment.name, stage) == stage:
                    self._fragments[tp_rank].setdefault(fragment.name, []).append((dp_rank, fragment))

    def find_mismatch(self, cuts: Mapping[str, Cut], names: set[str], everywhere: set[str], tp: int) -> str | None:
        """Says in one sentence why a model of the parameters `names` and `cuts` cannot be read, or returns None.

        `everywhere` has the parameters of all pipeline stages.
        """
        theirs = self._fragments[0]
        if other := everywhere.symmetric_difference(theirs):
            name = min(other)
            has, lacks = ("checkpoint", "model") if name in theirs else ("model", "checkpoint")
            return f"{self.where}: the {has} has {name}, the {lacks} has not; give another checkpoint"
        for name in sorted(names) if tp != self.tp else ():
            if name not in cuts or any(name not in rank for rank in self.cuts):
                return (
                    f"{self.where}: nothing says how {name} is divided over tensor-parallel ranks; go on "
                    f"with --tensor-model-parallel-size {self.tp}"
                )
            if cuts[name].shape != self.cuts[0][name].shape:
                return (
                    f"{self.where}: {name} has the shape {list(self.cuts[0][name].shape)}, this run's has "
                    f"{list(cuts[name].shape)}; give another checkpoint or the options it was trained with"
                )
        return None

    def list_names(self) -> list[str]:
        """Lists the model's parameters. Raises ValueError if `read_whole` cannot put one of them together."""
        names = sorted(self._fragments[0])
        if undivided := [name for name in names if any(name not in cuts for cuts in self.cuts)]:
            raise ValueError(
                f"{self.where}: nothing says how {undivided[0]} is divided over tensor-parallel ranks; give another "
                "checkpoint"
            )
        return names

    def read_whole(self, name: str) -> tuple[Tensor, float]:
        """Returns a weight of the whole model, and the largest difference between ranks that hold the same part of it.

        Such ranks compute the same gradient, but a GPU may sum it over the positions in another order on each of them.
        The lowest rank's part is returned.
        """
        whole, difference = torch.empty(self.cuts[0][name].shape, dtype=torch.float32), 0.0
        blocks = {(box.start, box.size): rank for rank, box in self._list_distinct_boxes(name)}
        for rank, cuts in enumerate(self.cuts):
            for box in cuts[name].boxes:
                values = self._read_box(rank, name, "weight", box)
                block = whole[tuple(slice(at, at + size) for at, size in zip(box.start, box.size, strict=True))]
                if blocks[box.start, box.size] == rank:
                    block.copy_(values)
                else:
                    difference = max(difference, (values - block).abs().max().item())
        return whole, difference

    def has_moments(self) -> bool:
        """Whether the optimizer has made a step."""
        return any(self._get_states(rank, 0) for rank in self._model_parallel_ranks)

    def read_step(self, name: str) -> float:
        """Returns how many steps AdamW has made with a parameter."""
        dp_rank, fragment = self._fragments[0][name][0]
        return float(self._get_states(self._get_model_parallel_rank(name, 0), dp_rank)[fragment.group]["step"])

    def read_counts(self) -> tuple[Any, dict[str, int]]:
        """Returns DeepSpeed's loss scaler, None if there is none, and what its engine counts."""
        scaler = self._read_content(0, 0).get("optimizer_state_dict", {}).get("loss_scaler")
        content = read_tensors(get_model_file(self.checkpoint, 0, self.zero_stage), is_mapped=True)
        return scaler, {name: content[name] for name in ("global_steps", "global_samples", "skipped_steps")}

    def read(self, name: str, key: str, first: int, last: int, *, cut: Cut | None, tp: int, tp_rank: int) -> Tensor:
        """Returns elements [first, last) of the flattened part of a parameter that rank `tp_rank` of `tp` holds.

        The result is flat, float32 and on the CPU. `key` is "weight" or one of MOMENTS. `cut` is that rank's; it is
        needed only if `tp` is not the checkpoint's.
        """
        if tp == self.tp:
            return self._read_range(tp_rank, name, key, first, last)
        assert cut is not None
        row = math.prod(cut.local_shape[1:])
        first_row, last_row = first // row, -(-last // row)
        # Read only the rows that hold a part of the range.
        rows = torch.empty((last_row - first_row, *cut.local_shape[1:]), dtype=torch.float32)
        missing = rows.numel()
        for box in cut.boxes:
            if (wanted := box.take_rows(first_row, last_row)) is None:
                continue
            for source_rank, source in self._list_distinct_boxes(name):
                if (common := overlap(wanted, source)) is None:
                    continue
                values = self._read_box(source_rank, name, key, common[1])
                rows[common[0].index(from_row=first_row)] = values
                missing -= values.numel()
        assert missing == 0, f"{name}: {missing} elements"
        return rows.flatten()[first - first_row * row : last - first_row * row]

    def _list_distinct_boxes(self, name: str) -> list[tuple[int, Box]]:
        """Lists the blocks that make up a parameter, each with the lowest rank that holds it."""
        distinct: dict[tuple[Any, ...], tuple[int, Box]] = {}
        for rank, cuts in enumerate(self.cuts):
            for box in cuts[name].boxes:
                distinct.setdefault((box.start, box.size), (rank, box))
        return list(distinct.values())

    def _read_box(self, tp_rank: int, name: str, key: str, box: Box) -> Tensor:
        shape = self.cuts[tp_rank][name].local_shape[1:]
        row, first_row, last_row = math.prod(shape), box.local_start[0], box.local_start[0] + box.size[0]
        rows = self._read_range(tp_rank, name, key, first_row * row, last_row * row)
        return rows.view(box.size[0], *shape)[box.index(from_row=first_row)]

    def _read_range(self, tp_rank: int, name: str, key: str, first: int, last: int) -> Tensor:
        tensors: list[Tensor] = []
        rank = self._get_model_parallel_rank(name, tp_rank)
        for dp_rank, fragment in sorted(self._fragments[tp_rank][name], key=lambda each: each[1].first):
            begin, end = max(first, fragment.first), min(last, fragment.last)
            if begin < end:
                flat, start = self._get_flat(rank, dp_rank, fragment, key), fragment.start - fragment.first
                tensors.append(flat[start + begin : start + end].to(torch.float32))
        assert sum(map(len, tensors)) == last - first, f"{name}: [{first}, {last}) of rank {tp_rank} is not whole"
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _get_model_parallel_rank(self, name: str, tp_rank: int) -> int:
        """Returns by which number DeepSpeed's files call the rank that holds a parameter."""
        return self._stages[name] * self.tp + tp_rank

    def _get_flat(self, model_parallel_rank: int, dp_rank: int, fragment: Fragment, key: str) -> Tensor:
        if key in MOMENTS:
            flat: Tensor = self._get_states(model_parallel_rank, dp_rank)[fragment.group][key]
        elif self.zero_stage == 0:
            flat = self._read_content(model_parallel_rank, dp_rank)["module"][fragment.name]
        else:
            states = self._read_content(model_parallel_rank, dp_rank)["optimizer_state_dict"]
            groups = "fp32_flat_groups" if self.zero_stage == 3 else "single_partition_of_fp32_groups"
            flat = states[groups][fragment.group]
        return flat.flatten()

    def _get_states(self, model_parallel_rank: int, dp_rank: int) -> Any:
        """Returns the optimizer's states by the number of the flat tensor."""
        content = self._read_content(model_parallel_rank, dp_rank)
        if self.zero_stage == 0:
            return content["optimizer"]["state"]
        states = content["optimizer_state_dict"]
        return states["optimizer_state_dict" if self.zero_stage == 3 else "base_optimizer_state"]["state"]

    def _read_uncached(self, model_parallel_rank: int, dp_rank: int) -> Any:
        if self._is_imported:
            return {"module": TensorFiles([self.checkpoint / WEIGHTS_FILE])}
        path = get_model_file(self.checkpoint, model_parallel_rank, 0)
        if self.zero_stage:
            name = f"zero_pp_rank_{dp_rank}_mp_rank_{model_parallel_rank:02d}_optim_states.pt"
            prefixed = self.checkpoint / f"bf16_{name}"  # written by DeepSpeed's BF16_Optimizer
            path = prefixed if prefixed.exists() else self.checkpoint / name
        return read_tensors(path, is_mapped=True)


def get_model_file(checkpoint: Path, model_parallel_rank: int, zero_stage: int) -> Path:
    """Returns the path of DeepSpeed's file with the model; under ZeRO-3 of the first data-parallel rank."""
    prefix = "zero_pp_rank_0_" if zero_stage == 3 else ""
    return checkpoint / f"{prefix}mp_rank_{model_parallel_rank:02d}_model_states.pt"
