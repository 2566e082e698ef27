"""What a run under `--use-tempo` says about itself: which slots were replaced, which were left, and what is kept."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tempo_megatron.config import TempoConfig
from tempo_megatron.megatron_lm.kept_bytes import KeptBytes, start_measuring
from tempo_megatron.megatron_lm.versions import LaunchError


@dataclasses.dataclass
class ModelReport:
    """One model, or pipeline stage of it, that was built with Tempo's slots."""

    name: str
    tempo_config: TempoConfig
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    """Operation -> why it is not what was asked for, or not everywhere."""

    slots: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Operation -> slots that hold Tempo's module, and slots there are."""

    draws_masks: bool = False
    knows_its_mask: bool = True
    """Whether every attention of the model is Tempo's, and hides the future without being given a mask."""

    leaves_mask_out: bool = False
    transformer_engine: str | None = None
    """What became of Transformer Engine's modules, where the layers have some."""

    kept_bytes: Callable[[], KeptBytes] | None = None
    """Waits for the bytes that one layer keeps."""

    def add_block(self, block: Any, config: Any, tempo_config: TempoConfig, reasons: Mapping[str, str]) -> None:
        """A block's spec that was built for `config`, with what "auto" became; a T5Model has two."""
        from tempo_megatron.slots.block_slots import count_slots, hides_the_future
        from tempo_megatron.slots.transformer_engine import describe_transformer_engine

        self.tempo_config = tempo_config
        self.transformer_engine = describe_transformer_engine(block) or self.transformer_engine
        self.reasons.update(reasons)
        for name, (ours, there) in count_slots(block).items():
            before = self.slots.get(name, (0, 0))
            self.slots[name] = (before[0] + ours, before[1] + there)
        dropouts = {"dropout": config.hidden_dropout, "attention": config.attention_dropout}
        self.draws_masks |= any(p > 0 and getattr(tempo_config, name) != "off" for name, p in dropouts.items())
        self.knows_its_mask &= hides_the_future(block)


class Report:
    """The report of a run. `publish_once` prints it on rank 0, when the first micro batch begins.

    Args:
        megatron_version: of Megatron-core.
        megatron_root: the checkout.
        file: where it goes as JSON too, or None.
    """

    def __init__(self, megatron_version: str, megatron_root: Path, file: str | None) -> None:
        self.megatron_version = megatron_version
        self.megatron_root = megatron_root
        self._file = file
        self._models: list[ModelReport] = []
        self._is_published = False
        self._is_first_rank = int(os.environ.get("RANK", "0")) == 0
        self._kept_bytes = KeptBytes(unknown="no model is built")

    def add(self, model: ModelReport, config: Any, run: Any) -> None:
        """A model that was built for `config`, a TransformerConfig; a pipeline stage may have several."""
        if self._is_first_rank and not self._models and model.name == "GPTModel" and model.transformer_engine is None:
            model.kept_bytes = start_measuring(config, model.tempo_config, run)
        self._models.append(model)

    def publish_once(self) -> None:
        """Print the report on rank 0 and write it, the first time.

        Raises LaunchError where no model was built with Tempo's slots: --use-tempo would have done nothing.
        """
        if self._is_published:
            return
        self._is_published = True
        if not self._models:
            raise LaunchError(
                "--use-tempo is given, but this script builds no GPTModel, BertModel or T5Model of megatron.core, the "
                "models whose layers Tempo replaces; leave --use-tempo out"
            )
        if not self._is_first_rank:
            return
        wait = self._models[0].kept_bytes
        self._kept_bytes = wait() if wait else KeptBytes(unknown="the ledger measures a GPT's local layers")
        print(self.describe(), flush=True)
        if self._file:
            Path(self._file).write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")

    def as_dict(self) -> dict[str, Any]:
        """What `--tempo-report` writes."""
        return {
            "megatron_core": self.megatron_version,
            "megatron_root": str(self.megatron_root),
            "kept_bytes_per_layer": dataclasses.asdict(self._kept_bytes),
            "models": [
                {
                    "model": model.name,
                    "tempo": dataclasses.asdict(model.tempo_config),
                    "slots": {name: {"tempo": ours, "all": there} for name, (ours, there) in model.slots.items()},
                    "reasons": model.reasons,
                    "attention_mask_left_out": model.leaves_mask_out,
                    "transformer_engine": model.transformer_engine,
                }
                for model in self._models
            ],
        }

    def describe(self) -> str:
        """The banner."""
        lines = [f"tempo: Megatron-core {self.megatron_version} at {self.megatron_root}"]
        for model in self._models:
            lines.append(f"tempo: {model.name}, {model.tempo_config.describe()}")
            replaced = [f"{name} {ours} of {there}" for name, (ours, there) in model.slots.items()]
            lines.append(f"tempo:   slots replaced: {', '.join(replaced)}")
            lines += [f"tempo:   {name}: {reason}" for name, reason in model.reasons.items()]
            if model.transformer_engine:
                lines.append(f"tempo:   {model.transformer_engine}")
            if model.leaves_mask_out:
                lines.append(
                    "tempo:   attention is causal and is given no mask, as with "
                    "--no-create-attention-mask-in-dataloader"
                )
        lines.append(f"tempo: kept for backward by one layer, in bytes: {self._kept_bytes.describe()}")
        return "\n".join(lines)
