"""What a test changes of the process that runs Megatron-LM; each function takes back its change when the run ends."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import zlib
from typing import Any


def run_out_of_memory(undo: contextlib.ExitStack, result: dict[str, Any]) -> None:
    """An allocation of the second step finds no memory."""
    import torch
    from megatron.core.models.gpt.gpt_model import GPTModel

    forward, calls = GPTModel.forward, itertools.count(1)

    def run_out(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 5:  # a step has four micro batches
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 KiB. GPU 0 is full.")
        return forward(*args, **kwargs)

    GPTModel.forward = run_out
    undo.callback(setattr, GPTModel, "forward", forward)


def mend_help(undo: contextlib.ExitStack, result: dict[str, Any]) -> None:
    """Print Megatron's help as far as argparse can: in 0.18 and 0.19 a text has a per cent sign that it takes for a
    format, so that stock's --help ends in an error."""
    expand = argparse.HelpFormatter._expand_help

    def expand_or_leave(formatter: Any, action: Any) -> str:
        try:
            return expand(formatter, action)
        except ValueError:
            return str(action.help)

    argparse.HelpFormatter._expand_help = expand_or_leave  # type: ignore[method-assign]
    undo.callback(setattr, argparse.HelpFormatter, "_expand_help", expand)


def use_torch_norms(undo: contextlib.ExitStack, result: dict[str, Any]) -> None:
    """Stock with torch's norms that know sequence parallelism, where Megatron's wrapper of them refuses it."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from tempo_megatron import TempoConfig, tempoize

    construct = GPTModel.__init__
    signature = inspect.signature(construct)

    def construct_with_torch_norms(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        spec = tempoize(
            given["transformer_layer_spec"], given["config"], TempoConfig.off(), vp_stage=given.get("vp_stage")
        )
        construct(**{**given, "transformer_layer_spec": spec})

    GPTModel.__init__ = construct_with_torch_norms
    undo.callback(setattr, GPTModel, "__init__", construct)


def take_latent_sizes(undo: contextlib.ExitStack, result: dict[str, Any]) -> None:
    """Megatron's local latent attention, which gives its core attention two sizes that only others take, and looks for
    a name that is not there without Transformer Engine."""
    import torch
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    construct = DotProductAttention.__init__

    def construct_of_one_size(self: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        assert k_channels == v_channels
        construct(self, *args, **kwargs)

    linear = multi_latent_attention.TELinear
    DotProductAttention.__init__, multi_latent_attention.TELinear = construct_of_one_size, torch.nn.Bilinear
    undo.callback(setattr, DotProductAttention, "__init__", construct)
    undo.callback(setattr, multi_latent_attention, "TELinear", linear)


def record_masks(undo: contextlib.ExitStack, result: dict[str, Any]) -> None:
    """Write down every mask that is drawn: of the hidden dropouts, by key, global sample and global row, a checksum of
    the row's bits; of attention, whose bits are a function of these, key, sample and head."""
    import torch

    from tempo_megatron.slots import attention as attention_slot
    from tempo_megatron.slots import context_parallel
    from tempo_megatron.slots import dropout as dropout_slot

    masks = result["masks"]
    draw = dropout_slot.bias_dropout_add

    def note(place: tuple[Any, ...], value: int) -> None:
        # A recomputed forward draws once more what it drew.
        assert masks.setdefault(place, value) == value

    def draw_and_note(x: Any, bias: Any, residual: Any, **draws: Any) -> Any:
        with torch.no_grad():
            kept = draw(torch.ones_like(x), None, None, **draws) != 0
        first_row = draws.get("first_row", 0)
        rows = draws["rows"].tolist() if "rows" in draws else range(first_row, first_row + x.size(0))
        for (i, row), sample in itertools.product(enumerate(rows), range(x.size(1))):
            bits = kept[i, sample].numpy().tobytes()
            note((draws["key"], draws["first_sample"] + sample, row), zlib.crc32(bits))
        return draw(x, bias, residual, **draws)

    def noting(attend: Any) -> Any:
        def attend_and_note(query: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs["dropout_p"] > 0:
                for sample, head in itertools.product(range(query.size(1)), range(query.size(2))):
                    place = (
                        kwargs["dropout_key"],
                        kwargs["first_sample"] + sample,
                        "head",
                        kwargs["first_head"] + head,
                    )
                    note(place, 0)
            return attend(query, *args, **kwargs)

        return attend_and_note

    for module, name, replacement in (
        (dropout_slot, "bias_dropout_add", draw_and_note),
        (attention_slot, "attention", noting(attention_slot.attention)),
        (context_parallel, "attend", noting(context_parallel.attend)),
    ):
        undo.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, replacement)


def forget_the_rank(undo: contextlib.ExitStack, result: dict[str, Any]) -> None:
    """A wrong sample index, in which neither the data-parallel rank nor the size of a micro batch counts."""
    from tempo_megatron.megatron_lm import samples

    find = samples.find_first_sample
    samples.find_first_sample = lambda args, microbatch_id, rank: args.consumed_train_samples + microbatch_id
    undo.callback(setattr, samples, "find_first_sample", find)


def keep_what_was_replaced(undo: contextlib.ExitStack, result: dict[str, Any]) -> None:
    """Names of what the run replaced, found at its end."""
    from megatron_rank import PLACES, find_owner

    before = {path: getattr(*find_owner(module, path)) for module, path in PLACES}
    undo.callback(
        lambda: result.update(
            replaced=[path for module, path in PLACES if getattr(*find_owner(module, path)) is not before[path]]
        )
    )


def measure_no_kept_bytes(undo: contextlib.ExitStack, result: dict[str, Any]) -> None:
    """Save the seconds of the process that measures them."""
    from tempo_megatron.megatron_lm import report

    start = report.start_measuring
    report.start_measuring = lambda *_, **__: lambda: report.KeptBytes(unknown="left out")
    undo.callback(setattr, report, "start_measuring", start)


def turn_heads(undo: contextlib.ExitStack, result: dict[str, Any]) -> None:
    """Tempo's attention hands out its heads in the wrong order."""
    from tempo_megatron.slots import attention

    compute = attention.attention
    attention.attention = lambda *args, **given: compute(*args, **given).flip(2)
    undo.callback(setattr, attention, "attention", compute)
