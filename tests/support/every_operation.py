"""Every operation in each of its forms as a function of the same inputs, for tests of what holds of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tempo_kernels.activation import activate
from tempo_kernels.attention import attention
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import geglu, glu, reglu, swiglu
from tempo_kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob
from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.silu import silu
from tempo_kernels.squared_relu import squared_relu

S, B, H, V = 12, 2, 32, 50
LABELS = torch.arange(B * S, dtype=torch.int64).view(B, S) % 47
TOKEN_WEIGHTS = torch.full((B, S), 0.3, dtype=torch.float32)
SLOPES = torch.tensor([0.5, 0.25], dtype=torch.float32)


def attend(x: Tensor, key: Any, first_sample: Any, form: str = "flash", **more: Any) -> Tensor:
    q, k, v = (x * scale for scale in (1.0, 0.5, 2.0))
    q, k, v = (t.view(*x.shape[:2], 2, -1) for t in (q, k, v))
    chosen = {"causal": True, "softmax_scale": 0.3, "dropout_p": 0.1, "form": form}
    return attention(q, k, v, dropout_key=key, first_sample=first_sample, **chosen, **more)


def losses(x: Tensor, bias: Tensor, weight: Tensor, is_weighted: bool = False) -> Tensor:
    more = {"token_weights": TOKEN_WEIGHTS.to(x.device)} if is_weighted else {}
    settings = {"label_smoothing": 0.1, "z_loss": 1e-3, "chunk_tokens": 7}
    found = linear_cross_entropy(x, weight, LABELS.to(x.device), bias=bias, **settings, **more)
    return found[0] if is_weighted else found


def log_probs(x: Tensor, bias: Tensor, weight: Tensor, form: str) -> Tensor:
    settings = {"bias": bias, "vocab_size": 48, "chunk_tokens": 7}
    found = linear_log_prob(x, weight, LABELS.to(x.device), 0.7, 30.0, form != "log_prob", **settings)
    return {"log_prob": lambda: found, "entropy": lambda: found[1], "both": lambda: torch.cat(found)}[form]()


# By the operation's name, and what is said of the form, of x [S, B, H], a bias [H], another [V], a weight [V, H], the
# key of a mask and its first sample.
OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": lambda x, b, *_: gelu(x, b),
    "gelu tanh": lambda x, b, *_: gelu(x, b, approximate="tanh"),
    "gelu of its input": lambda x, b, *_: gelu(x, b, keep="recompute"),
    "gelu tanh of its input": lambda x, b, *_: gelu(x, b, approximate="tanh", keep="recompute"),
    "squared_relu": lambda x, b, *_: squared_relu(x, b),
    "squared_relu of its input": lambda x, b, *_: squared_relu(x, b, keep="recompute"),
    "silu": lambda x, b, *_: silu(x, b),
    "relu": lambda x, b, *_: activate(x, b, "relu"),
    "glu": lambda x, b, *_: glu(x, b, "silu"),
    "swiglu": lambda x, b, *_: swiglu(x, b),
    "geglu": lambda x, b, *_: geglu(x, b),
    "reglu": lambda x, b, *_: reglu(x, b),
    "layer_norm": lambda x, b, *_: layer_norm(x, 2 + b.tanh(), b.tanh()),
    "layer_norm of its input": lambda x, b, *_: layer_norm(x, b, x.flatten(0, 1).select(0, 0), keep="recompute"),
    "rms_norm": lambda x, b, *_: rms_norm(x, 2 + b.tanh()),
    "rms_norm of its input": lambda x, b, *_: rms_norm(x, b, zero_centered=True, keep="recompute"),
    "bias_dropout_add": lambda x, b, c, w, key, first: bias_dropout_add(
        x, b, x * 2, p=0.1, key=key, first_sample=first
    ),
    "attention": lambda x, b, c, w, key, first: attend(x, key, first),
    "attention in documents": lambda x, b, c, w, key, first: attend(
        x.reshape(S * B, 1, -1), key, first, cu_seqlens=torch.tensor([1, 5, 24], dtype=torch.int32, device=x.device)
    ),
    "attention keeping its softmax": lambda x, b, c, w, key, first: attend(x, key, first, "softmax"),
    "attention with all that changes scores": lambda x, b, c, w, key, first: attend(
        x,
        key,
        first,
        sink=b.narrow(0, 0, 2),
        softcap=2.0,
        alibi_slopes=SLOPES.to(x.device),
        bias=b.narrow(0, 2, 12).view(1, 1, 1, -1),
    ),
    "linear_cross_entropy": lambda x, b, c, w, *_: losses(x, c, w),
    "linear_cross_entropy with token_weights": lambda x, b, c, w, *_: losses(x, c, w, True),
    "linear_log_prob": lambda x, b, c, w, *_: log_probs(x, c, w, "log_prob"),
    "linear_log_prob with entropy": lambda x, b, c, w, *_: log_probs(x, c, w, "both"),
    "linear_log_prob, its entropy alone": lambda x, b, c, w, *_: log_probs(x, c, w, "entropy"),
}


def make_inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """x, both biases and the weight: the same numbers each time, rounded to `dtype`."""
    generator, shapes = torch.Generator().manual_seed(seed), ((S, B, H), (H,), (V,), (V, H))
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
