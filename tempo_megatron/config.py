"""TempoConfig: which operations of a transformer layer keep less for backward, and how."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tempo_megatron.operations import CHOICES, RENAMED


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TempoConfig:
    """What each operation keeps for backward. `TempoConfig()` is `"auto"` throughout.

    `"auto"` is in place where the model has that, else recompute, else stock; `tempo_megatron.slots.choices.choose`
    says which and why. `"off"` is stock Megatron. Any other value is taken as written: a model that cannot have
    it is refused.

    Raises ValueError for a choice that does not exist.
    """

    activation: str = "auto"
    """The MLP's activation. "inplace", for gelu and squared relu: the output (which the next linear keeps anyway) and,
    for gelu, one bit per element instead of the input. "recompute", for gated ones too: the input instead of the
    output, which is made again in backward."""

    norm: str = "auto"
    """"inplace": the output (which the next linear keeps anyway) and rstd instead of the input. "recompute": the input
    instead of the output, which is made again in backward; exact."""

    dropout: str = "auto"
    """"recompute": nothing; the mask is redrawn in backward. Hidden and embedding dropout."""

    attention: str = "auto"
    """"flash": q, k, v, output and logsumexp; no s*s tensor and no mask, dropout redrawn in backward.
    "softmax", the paper's form: one s*s tensor, the softmax's output; the dropout's output and mask redrawn."""

    loss: str = "auto"
    """"fused": the output layer and the cross entropy in one, a chunk of tokens at a time; no logits of all tokens."""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"tempo.{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")

    @classmethod
    def off(cls) -> TempoConfig:
        """Stock Megatron in every slot."""
        return cls(**dict.fromkeys(CHOICES, "off"))

    @property
    def is_off(self) -> bool:
        """Whether every operation is stock by its value; "auto" is not, whatever becomes of it."""
        return all(getattr(self, name) == "off" for name in CHOICES)

    @classmethod
    def from_dict(cls, block: Mapping[str, Any]) -> TempoConfig:
        """From a `"tempo"` block. `"enabled": false` gives `TempoConfig.off()`; a missing `enabled` means true.

        Raises ValueError for an unknown key, naming the nearest known one, and for a value that does not exist.
        """
        checked = check_block(block)
        if not checked.pop("enabled", True):
            return cls.off()
        return cls(**checked)

    @classmethod
    def from_file(cls, path: str | Path) -> TempoConfig:
        """From the `"tempo"` block of a DeepSpeed JSON, or from a file that holds only such a block.

        Raises ValueError where the file is not JSON or a key is unknown, OSError where it cannot be read.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON ({error}); correct it or give another file") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds a {type(content).__name__}; expected a JSON object")
        if "tempo" in content:
            return cls.from_dict(content["tempo"])
        if content and not set(content) & {*CHOICES, *RENAMED, "enabled"}:
            raise ValueError(f'{path} has no "tempo" block; add one, for example "tempo": {{"activation": "auto"}}')
        return cls.from_dict(content)

    def describe(self) -> str:
        """One line: `activation=inplace norm=auto dropout=recompute attention=flash loss=auto`."""
        return " ".join(f"{name}={getattr(self, name)}" for name in CHOICES)


def check_block(block: object) -> dict[str, Any]:
    """A copy of a `"tempo"` block whose keys are known and whose values exist; else ValueError."""
    if not isinstance(block, Mapping):
        raise ValueError(f'"tempo" is {block!r}; expected a block such as {{"activation": "auto"}}')
    known = ("enabled", *CHOICES)
    for key, value in block.items():
        if key in RENAMED:
            raise ValueError(f"tempo.{key} is now tempo.{RENAMED[key]}; write {RENAMED[key]} instead of {key}")
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise ValueError(f"tempo.{key} is unknown; the nearest known name is tempo.{near}")
        if key == "enabled" and not isinstance(value, bool):
            raise ValueError(f"tempo.enabled is {value!r}; it must be true or false")
        if key in CHOICES and value not in CHOICES[key]:
            raise ValueError(f"tempo.{key} is {value!r}; it must be one of {', '.join(map(repr, CHOICES[key]))}")
    return dict(block)
