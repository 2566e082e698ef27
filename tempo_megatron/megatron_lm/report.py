"""Writes the banner of a run under `--use-tempo`: slots replaced, slots left and why, bytes kept."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import ProcessGroup

from tempo_megatron.megatron_lm.kept_bytes import KeptBytes, start_measuring
from tempo_megatron.megatron_lm.versions import LaunchError
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import write_layers
from tempo_megatron.slots.block_slots import hides_the_future
from tempo_megatron.slots.check import LayerChecks
from tempo_megatron.slots.dropout_rng import draws_masks
from tempo_megatron.slots.offload import Offloading
from tempo_megatron.slots.transformer_engine import has_transformer_engine

NOTHING_TO_REPLACE = (
    "--use-tempo is given, but this script builds no GPTModel, BertModel, T5Model or HybridModel of megatron.core, "
    "the models whose layers Tempo replaces; leave --use-tempo out"
)


@dataclasses.dataclass
class BuiltModel:
    """One model, or pipeline stage of it, that was built with Tempo's slots."""

    name: str
    tempo_config: TempoConfig
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    """Operation -> why it is not what was asked for, or not everywhere."""

    report: Any = None
    """The TempoReport of the built model."""

    draws_masks: bool = False
    knows_its_mask: bool = True
    """Whether every attention of the model is Tempo's, and hides the future without a mask."""

    leaves_mask_out: bool = False
    has_transformer_engine: bool = False
    """Whether the layers have modules of Transformer Engine; its linears stay."""

    stage: int = 0
    chunk: int = 0
    """Its number on its rank, which has several of virtual pipeline stages."""

    def add_block(self, block: Any, config: Any, choices: Any) -> None:
        """Add a block's spec that was made for `config` with these Choices; a T5Model has two."""
        self.tempo_config = choices.config
        self.has_transformer_engine |= any(map(has_transformer_engine, block.layer_specs or []))
        self.reasons.update(choices.reasons)
        self.draws_masks |= draws_masks(config, choices.config)
        self.knows_its_mask &= hides_the_future(block)

    def as_dict(self) -> dict[str, Any]:
        """What `--tempo-report` writes of it."""
        return {
            "model": self.name,
            "stage": self.stage,
            "chunk": self.chunk,
            "tempo": dataclasses.asdict(self.tempo_config),
            **self.report.as_dict(),
            "reasons": self.reasons,
            "attention_mask_left_out": self.leaves_mask_out,
            "transformer_engine": self.has_transformer_engine,
        }

    def describe(self) -> list[str]:
        """Its lines of the banner."""
        lines = [f"{self.name}, {self.tempo_config.describe()}"]
        lines.append(f"  slots replaced: {self.report.describe_counts()}")
        lines += [f"  left: {line}" for line in self.report.describe_left()]
        # Reasons of "auto" that left a slot are listed there already.
        lines += [
            f"  {name}={getattr(self.tempo_config, name)}: {reason}"
            for name, reason in self.reasons.items()
            if not any(slot.left == f"auto: {reason}" for slot in self.report.left)
        ]
        if self.has_transformer_engine:
            lines.append("  Transformer Engine's linears stay")
        if self.leaves_mask_out:
            lines.append("  attention is causal and is given no mask, as with --no-create-attention-mask-in-dataloader")
        return lines


class RunReport:
    """The report of a run. `publish_once` prints it on rank 0, before the first forward.

    Args:
        megatron_version: of Megatron-core.
        megatron_root: the folder that holds the package megatron: a checkout, or where it is installed.
        file: where it goes as JSON too, or None.
    """

    def __init__(self, megatron_version: str, megatron_root: Path, file: str | None) -> None:
        self.megatron_version = megatron_version
        self.megatron_root = megatron_root
        self._file = file
        self.models: list[BuiltModel] = []
        self._is_published = False
        self._of_all_stages: list[BuiltModel] | None = None
        self.plan: str | None = None
        """What was planned for a memory budget, in lines."""
        self.offloading: Offloading | None = None
        """Of this rank's layers."""
        self._has_said_what_moves = False
        self._is_first_rank = int(os.environ.get("RANK", "0")) == 0
        self._wait: Callable[[], KeptBytes] = lambda: KeptBytes(unknown="what is measured are the layers of a GPTModel")
        self._kept_bytes = self._wait()
        self._num_stages = 1
        self._checked: list[str] = []

    def add(self, model: BuiltModel, config: Any, run: Any) -> None:
        """Add a model that was built for `config`, a TransformerConfig; a pipeline stage may have several.

        run: Megatron's arguments, or None.
        """
        if self._is_first_rank and not self.models and model.name == "GPTModel":
            self._wait = start_measuring(
                config, model.tempo_config, run, has_transformer_engine=model.has_transformer_engine
            )
        if parallel_state.model_parallel_is_initialized():
            self._num_stages = parallel_state.get_pipeline_model_parallel_world_size()
            model.stage = parallel_state.get_pipeline_model_parallel_rank()
        model.chunk = len(self.models)
        self.models.append(model)

    def gather_once(self, pipeline: ProcessGroup | None) -> None:
        """Bring the models of all stages to the first one, in the order of their layers; all of the group call it."""
        if pipeline is None or self._of_all_stages is not None:
            return
        stages: list[Any] | None = [None] * pipeline.size() if pipeline.rank() == 0 else None
        dist.gather_object(self.models, stages, group=pipeline, group_dst=0)
        models = itertools.chain(*(stages or [self.models]))
        self._of_all_stages = sorted(models, key=lambda model: (model.chunk, model.stage))

    def publish_once(self) -> None:
        """Print the report on rank 0 and write it, the first time.

        Raises LaunchError where no model was built with Tempo's slots: --use-tempo would have done nothing.
        """
        if self._is_published:
            return
        self._is_published = True
        if not self.models:
            raise LaunchError(NOTHING_TO_REPLACE)
        if not self._is_first_rank:
            return
        self._kept_bytes = self._wait()
        print(self.describe(), flush=True)
        self._write()

    def _write(self) -> None:
        if self._file:
            Path(self._file).write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")

    @functools.cached_property
    def checks(self) -> LayerChecks:
        """What compares layers with Megatron's own in the first forward."""
        return LayerChecks(self._say_check, refuse=lambda sentence: LaunchError(f"--use-tempo: {sentence}"))

    def _say_check(self, line: str) -> None:
        self._checked.append(line)
        if self._is_first_rank:
            print(f"tempo: {line}", flush=True)
            self._write()

    def say_what_moves(self) -> None:
        """Print on rank 0 what the layers have moved to the host, once the first step has been trained."""
        if self._has_said_what_moves or self.offloading is None or not self.offloading.engine.moved_bytes:
            return
        self._has_said_what_moves = True
        if self._is_first_rank:
            print(f"tempo: offload: {self.offloading.describe()}", flush=True)

    def as_dict(self) -> dict[str, Any]:
        """What `--tempo-report` writes."""
        return {
            "megatron_core": self.megatron_version,
            "megatron_root": str(self.megatron_root),
            "plan": self.plan,
            "kept_bytes_per_layer": dataclasses.asdict(self._kept_bytes),
            "checks": self._checked,
            "models": [model.as_dict() for model in self._of_all_stages or self.models],
        }

    def describe(self) -> str:
        """The banner."""
        lines = [f"tempo: Megatron-core {self.megatron_version} at {self.megatron_root}"]
        lines += [f"tempo: plan: {line}" for line in (self.plan or "").splitlines()]
        if self.offloading is not None:
            lines.append(f"tempo: offload: {self.offloading.describe()}")
        # Stages that say the same share their lines.
        places: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for model in self._of_all_stages or self.models:
            places.setdefault((model.chunk, tuple(model.describe())), []).append(model.stage)
        for (chunk, described), stages in places.items():
            if self._num_stages > 1:
                where = f"stage{'s' if len(stages) > 1 else ''} {write_layers(stages)} of {self._num_stages}"
                lines.append(f"tempo: {where}{f', chunk {chunk}' if self.models[-1].chunk else ''}:")
            lines += [f"tempo: {line}" for line in described]
        lines.append(f"tempo: kept for backward by one layer, in bytes: {self._kept_bytes.describe()}")
        return "\n".join(lines)
