"""Makes up inputs that a model of transformers accepts, from its configuration."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""(args, kwargs)."""
_SAMPLES, _TOKENS, _WAVE = 2, 16, 8000
_CHECKED_TOKENS, _PADDED = 32, 5


def make_inputs(model: Any, has_loss: bool, num_tokens: int = _TOKENS) -> Inputs | None:
    """Returns a call, of tensors without memory, that a model accepts; None if its configuration does not say enough.

    Args:
        has_loss: whether the call has labels.
        num_tokens: how many tokens a sample of text has.
    """
    config: Any = getattr(model, "config", None)
    name: Any = getattr(model, "main_input_name", None)
    ids = torch.empty(_SAMPLES, num_tokens, dtype=torch.int64, device="meta")
    shape: tuple[int, ...] | None = None
    if name == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        shape = (getattr(config, "num_channels", 3), *((size, size) if isinstance(size, int) else size))
    elif name == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        shape = (config.num_mel_bins, 2 * config.max_source_positions)
    elif name == "input_values" and hasattr(config, "conv_stride"):
        shape = (_WAVE,)
    if shape is not None:
        inputs = {name: torch.empty(_SAMPLES, *shape, dtype=model.dtype, device="meta")}
    elif name == "input_ids" and hasattr(config, "vocab_size"):
        inputs = {name: ids}
    else:
        return None
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    return (), inputs | ({"labels": ids} if has_loss else {})


def make_calls(model: Any, has_loss: bool) -> list[Inputs] | None:
    """Returns calls with values: without a mask, and with padding on either side where the model takes a mask."""
    config = getattr(model, "config", None)
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    num_tokens = min([_CHECKED_TOKENS, *(limit for limit in limits if isinstance(limit, int))])
    if (call := make_inputs(model, has_loss, num_tokens)) is None:
        return None
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(0)
    given: dict[str, Tensor] = {}
    for name, value in call[1].items():
        if value.is_floating_point():
            given[name] = torch.randn(value.shape, generator=generator).to(device, value.dtype)
        else:
            ids = _list_ids(config)
            given[name] = ids[torch.randint(len(ids), value.shape, generator=generator)].to(device)
    is_copied = "labels" in given and "decoder_input_ids" not in given
    if is_copied:
        given["labels"] = given["input_ids"].clone()
    if "input_ids" not in given or "attention_mask" not in inspect.signature(model.forward).parameters:
        return [((), given)]
    padding = min(_PADDED, given["input_ids"].size(1) // 2)
    mask = torch.ones_like(given["input_ids"])
    mask[0, :padding] = 0
    mask[1, -padding:] = 0
    padded = {**given, "attention_mask": mask}
    if is_copied:
        padded["labels"] = given["labels"].masked_fill(mask == 0, -100)
    return [((), given), ((), padded)]


def _list_ids(config: Any) -> Tensor:
    """Lists the token ids without a special meaning."""
    text = config.get_text_config()
    special: set[Any] = set()
    for name, value in [*text.__dict__.items(), *config.__dict__.items()]:
        if name.endswith(("_token_id", "_token_index")):
            special.update(value if isinstance(value, list | tuple) else (value,))
    size = min(value for value in (getattr(text, "vocab_size", None), getattr(config, "vocab_size", None)) if value)
    return torch.tensor([each for each in range(size) if each not in special] or [0])


def name_inputs(call: Inputs) -> str:
    """Names the tensors of a call with their shapes."""
    given = [*enumerate(call[0]), *call[1].items()]
    return ", ".join(f"{name} {list(value.shape)}" for name, value in given if isinstance(value, Tensor))
