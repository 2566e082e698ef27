"""Reads weights and moments of a checkpoint by parameter and range, whatever layout wrote it.

Files are memory-mapped, and only the requested elements are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tempo_megatron.training.checkpoint_files.files import name_rank_file, read_tensors
from tempo_megatron.training.checkpoint_files.layout import MOMENTS, Box, Cut, Fragment, overlap


class SavedState:
    """What the ranks of a run have written to `checkpoint`.

    Args:
        checkpoint: one checkpoint's folder, iter_XXXXXXX.
        saved: the content of its run.json.

    Raises ValueError where a file is missing or damaged, or where the checkpoint does not say what lies where.
    """

    def __init__(self, checkpoint: Path, saved: Mapping[str, Any]) -> None:
        self.checkpoint, self.zero_stage = checkpoint, int(saved["zero_stage"])
        self.tp: int = saved["tensor_model_parallel_size"]
        # Without ZeRO every data-parallel rank has the same, and one of them writes.
        self.dp: int = saved["data_parallel_size"] if self.zero_stage else 1
        self._contents: dict[tuple[int, int], Any] = {}
        # By tensor-parallel rank and name.
        self.cuts: list[dict[str, Cut]] = [{} for _ in range(self.tp)]
        self._fragments: list[dict[str, list[tuple[int, Fragment]]]] = [{} for _ in range(self.tp)]
        for rank in range(self.tp * saved["data_parallel_size"]):
            self._add_rank(read_tensors(checkpoint / name_rank_file(rank)).get("layout"))

    def _add_rank(self, layout: dict[str, Any] | None) -> None:
        if layout is None:
            raise ValueError(
                f"--load {self.checkpoint} was saved by an older version of the trainer, which did not write how its "
                "ranks divide the weights; train on with the number of processes, the tensor parallel size and the "
                "JSON it was saved with, save once, and take the new checkpoint"
            )
        tp_rank, dp_rank = layout["tp_rank"], layout["dp_rank"]
        if dp_rank == 0:
            self.cuts[tp_rank] = {name: Cut.unpack(cut) for name, cut in layout["cuts"].items()}
        if dp_rank < self.dp:
            for fragment in (Fragment(*packed) for packed in layout["fragments"]):
                self._fragments[tp_rank].setdefault(fragment.name, []).append((dp_rank, fragment))

    def find_mismatch(self, cuts: Mapping[str, Cut], names: set[str], tp: int) -> str | None:
        """One sentence where the parameters `names` of a model cannot be read with its `cuts`; None where they can."""
        theirs = self._fragments[0]
        if other := names.symmetric_difference(theirs):
            name = min(other)
            has, lacks = ("checkpoint", "model") if name in theirs else ("model", "checkpoint")
            return f"--load {self.checkpoint}: the {has} has {name}, the {lacks} has not; give another checkpoint"
        for name in sorted(names) if tp != self.tp else ():
            if name not in cuts or any(name not in rank for rank in self.cuts):
                return (
                    f"--load {self.checkpoint}: nothing says how {name} is divided over tensor-parallel ranks; go on "
                    f"with --tensor-model-parallel-size {self.tp}"
                )
            if cuts[name].shape != self.cuts[0][name].shape:
                return (
                    f"--load {self.checkpoint}: {name} has the shape {list(self.cuts[0][name].shape)}, this run's has "
                    f"{list(cuts[name].shape)}; give another checkpoint or the options it was trained with"
                )
        return None

    def list_names(self) -> list[str]:
        """The parameters of the model.

        Raises ValueError where one of them is nothing that `read_whole` can put together.
        """
        names = sorted(self._fragments[0])
        for name in names:
            if any(name not in cuts for cuts in self.cuts):
                raise ValueError(
                    f"--load {self.checkpoint}: nothing says how {name} is divided over tensor-parallel ranks; give "
                    "another checkpoint"
                )
        return names

    def read_whole(self, name: str) -> tuple[Tensor, float]:
        """A weight of the whole model, and how far apart ranks are that each hold the same part of it.

        Such parts get equal gradients, but a GPU may add those of the positions in another order on each rank. The
        lowest rank's is the one returned.
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
        """Whether the optimizer had made a step."""
        return any(self._find_states(rank, 0) for rank in range(self.tp))

    def read_step(self, name: str) -> float:
        """The number of AdamW's steps that a parameter has had."""
        dp_rank, fragment = self._fragments[0][name][0]
        return float(self._find_states(0, dp_rank)[fragment.group]["step"])

    def read_model_file(self) -> Any:
        """What DeepSpeed says besides tensors, and each rank alike."""
        return read_tensors(find_model_file(self.checkpoint, 0, self.zero_stage), is_mapped=True)

    def read_optimizer_file(self) -> Any:
        """As read_model_file; with ZeRO the loss scaler is in it."""
        return self._read_content(0, 0)

    def read(self, name: str, key: str, first: int, last: int, *, cut: Cut | None, tp: int, tp_rank: int) -> Tensor:
        """Elements [first, last) of a flattened parameter of rank `tp_rank` of `tp`; float32, flat, on the CPU.

        Args:
            key: "weight" or one of MOMENTS.
            cut: that rank's; not needed where `tp` is the checkpoint's.
        """
        if tp == self.tp:
            return self._read_range(tp_rank, name, key, first, last)
        assert cut is not None
        row = math.prod(cut.local_shape[1:])
        first_row, last_row = first // row, -(-last // row)
        # Only the rows that hold a part of the range.
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
        """The blocks that make up a parameter; of ranks that hold the same one, the lowest."""
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
        parts: list[tuple[int, Tensor]] = []
        for dp_rank, fragment in self._fragments[tp_rank][name]:
            begin, end = max(first, fragment.first), min(last, fragment.last)
            if begin < end:
                flat, start = self._find_flat(tp_rank, dp_rank, fragment, key), fragment.start - fragment.first
                parts.append((begin, flat[start + begin : start + end]))
        parts.sort(key=lambda part: part[0])
        tensors = [tensor for _, tensor in parts]
        assert sum(map(len, tensors)) == last - first, f"{name}: [{first}, {last}) of rank {tp_rank} is not whole"
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _find_flat(self, tp_rank: int, dp_rank: int, fragment: Fragment, key: str) -> Tensor:
        if key in MOMENTS:
            flat: Tensor = self._find_states(tp_rank, dp_rank)[fragment.group][key]
        elif self.zero_stage == 0:
            flat = self._read_content(tp_rank, dp_rank)["module"][fragment.name]
        else:
            states = self._read_content(tp_rank, dp_rank)["optimizer_state_dict"]
            groups = "fp32_flat_groups" if self.zero_stage == 3 else "single_partition_of_fp32_groups"
            flat = states[groups][fragment.group]
        return flat.flatten()

    def _find_states(self, tp_rank: int, dp_rank: int) -> Any:
        """The optimizer's states by the number of the flat tensor."""
        content = self._read_content(tp_rank, dp_rank)
        if self.zero_stage == 0:
            return content["optimizer"]["state"]
        states = content["optimizer_state_dict"]
        return states["optimizer_state_dict" if self.zero_stage == 3 else "base_optimizer_state"]["state"]

    def _read_content(self, tp_rank: int, dp_rank: int) -> Any:
        if (tp_rank, dp_rank) not in self._contents:
            if self.zero_stage == 0:
                path = find_model_file(self.checkpoint, tp_rank, 0)
            else:
                path = find_optimizer_file(self.checkpoint, tp_rank, dp_rank)
            self._contents[tp_rank, dp_rank] = read_tensors(path, is_mapped=True)
        return self._contents[tp_rank, dp_rank]


def find_model_file(checkpoint: Path, tp_rank: int, zero_stage: int, dp_rank: int = 0) -> Path:
    """DeepSpeed's file of the model; only ZeRO 3 has one per data-parallel rank."""
    prefix = f"zero_pp_rank_{dp_rank}_" if zero_stage == 3 else ""
    return checkpoint / f"{prefix}mp_rank_{tp_rank:02d}_model_states.pt"


def find_optimizer_file(checkpoint: Path, tp_rank: int, dp_rank: int) -> Path:
    """DeepSpeed's file of one rank's optimizer under ZeRO; its bf16 optimizer puts a prefix before the name."""
    name = f"zero_pp_rank_{dp_rank}_mp_rank_{tp_rank:02d}_optim_states.pt"
    prefixed = checkpoint / f"bf16_{name}"
    return prefixed if prefixed.exists() else checkpoint / name
