"""A stand-in for the package transformer_engine, so that Megatron's own wrappers around it run without a GPU.

`install()` puts it where Megatron looks for it, and must come before anything imports megatron.core. Transformer Engine
needs CUDA. What is imitated here, after its sources (2.0 to 2.9, and its main branch of 2026):
- constructor arguments, parameter names, shapes and order, `sequence_parallel` flags and the empty `_extra_state` of
  `Linear`, `LayerNormLinear`, `LayerNorm`, `RMSNorm`, `DotProductAttention`, and of the operations of `ops`;
- what they keep for backward without fp8: a linear its input as it came in (not a copy, and under sequence parallelism
  this rank's part of it), `LayerNormLinear` its input, the norm's output, mean and rstd;
- what `return_layernorm_output` and `return_layernorm_output_gathered` add to what `LayerNormLinear` returns;
- what they communicate, forward and backward;
- that attention with a causal mask, or none, looks at no mask it is given, and that a causal layer's window shows no
  token those after it.

What is not: its kernels and their rounding, scales of fp8, overlap with communication, CUDA graphs. Attention is
torch's. A test that passes here says that Tempo fits Megatron's side of Transformer Engine; it says nothing of a GPU.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

VERSION = "2.6.0"
QUANTISES = False
"""Whether linears compute in FP8 and keep a quantised copy of their input, of one byte per element and without scales,
or, with save_original_input, the input itself, which they quantise once more in backward."""


def quantise(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn) if QUANTISES else x


class _HasExtraState(torch.nn.Module):
    """What all modules of Transformer Engine have, empty without fp8."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        assert state is None or state.numel() == 0


class Linear(_HasExtraState):
    """y = x W^T + b with the communication of `parallel_mode`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cpu",
        save_original_input: bool = False,
        **more: Any,
    ) -> None:
        super().__init__()
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.parallel_mode, self.tp_group, self.tp_size = parallel_mode, tp_group, tp_size
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.save_original_input = save_original_input
        make = functools.partial(torch.empty, dtype=params_dtype, device=device)
        self._add_norm(make, **more)
        self.weight = torch.nn.Parameter(make(self.out_features, self.in_features))
        if init_method is not None:
            init_method(self.weight)
        self._split(self.weight, 1 if parallel_mode == "row" else 0)
        self.bias: Any = torch.nn.Parameter(make(self.out_features).zero_()) if bias else torch.Tensor()
        if bias and parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        elif bias and parallel_mode == "column":
            self._split(self.bias, 0)

    def _add_norm(self, make: Any, **_: Any) -> None:
        pass

    @staticmethod
    def _split(parameter: Any, dim: int) -> None:
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._finish(_Linear.apply(inp, self.weight, self))

    def _finish(self, out: Tensor) -> Any:
        if self.apply_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class _Linear(torch.autograd.Function):
    """x W^T; x is kept as it came in."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, weight: Tensor, module: Linear) -> Tensor:
        ctx.module = module
        used = quantise(inp)
        ctx.save_for_backward(inp if module.save_original_input else used, weight)
        return reduced(gathered(used.to(inp.dtype), module) @ weight.t(), module)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        inp, weight = ctx.saved_tensors
        return *linear_backward(grad, quantise(inp).to(grad.dtype), weight, ctx.module), None


def linear_backward(grad: Tensor, inp: Tensor, weight: Tensor, module: Linear) -> tuple[Tensor, Tensor]:
    if module.parallel_mode == "row" and module.sequence_parallel:
        grad = gather(grad, module)
    grad_weight = grad.flatten(0, -2).t() @ gathered(inp, module).flatten(0, -2)
    grad_inp = grad @ weight
    if module.parallel_mode == "column" and module.tp_size > 1:
        grad_inp = scatter(grad_inp, module) if module.sequence_parallel else added(grad_inp, module)
    return grad_inp, grad_weight


def gathered(inp: Tensor, module: Linear) -> Tensor:
    return gather(inp, module) if module.parallel_mode == "column" and module.sequence_parallel else inp


def reduced(out: Tensor, module: Linear) -> Tensor:
    if module.parallel_mode != "row" or module.tp_size == 1:
        return out
    return scatter(out, module) if module.sequence_parallel else added(out, module)


def gather(x: Tensor, module: Linear) -> Tensor:
    whole = x.new_empty(x.size(0) * module.tp_size, *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=module.tp_group)
    return whole


def scatter(x: Tensor, module: Linear) -> Tensor:
    part = x.new_empty(x.size(0) // module.tp_size, *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous(), group=module.tp_group)
    return part


def added(x: Tensor, module: Linear) -> Tensor:
    x = x.contiguous()
    dist.all_reduce(x, group=module.tp_group)
    return x


class LayerNormLinear(Linear):
    """A norm, and a linear of its output, in one operation that keeps the input of both."""

    def _add_norm(
        self,
        make: Any,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **_: Any,
    ) -> None:
        self.return_layernorm_output, self.return_layernorm_output_gathered = return_layernorm_output, False
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        gamma, self.layer_norm_bias = make(self.in_features).fill_(0.0 if zero_centered_gamma else 1.0), None
        self.layer_norm_weight: Any = torch.nn.Parameter(gamma)
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros_like(gamma))
        for parameter in self.parameters():
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        out, ln_out = _LayerNormLinear.apply(inp, self.layer_norm_weight, self.layer_norm_bias, self.weight, self)
        result = self._finish(out)
        if not self.return_layernorm_output:
            return result
        return (*result, ln_out) if self.return_bias else (result, ln_out)


class _LayerNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, gamma: Tensor, beta: Any, weight: Tensor, module: LayerNormLinear) -> Any:
        ctx.module = module
        ctx.set_materialize_grads(False)
        ln_out = normalize(inp, gamma, beta, module.eps, module.zero_centered_gamma, module.normalization)
        mu = inp.float().mean(-1)
        rsigma = (inp.float().var(-1, correction=0) + module.eps).rsqrt()
        used = quantise(ln_out)
        ctx.save_for_backward(inp, gamma, beta, weight, used, mu, rsigma)
        given = ln_out.clone() if module.return_layernorm_output else None
        if given is not None and module.return_layernorm_output_gathered:
            given = gathered(given, module)
        return gathered(used.to(inp.dtype), module) @ weight.t(), given

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_given: Any) -> tuple[Any, ...]:
        inp, gamma, beta, weight, ln_out, _, _ = ctx.saved_tensors
        module = ctx.module
        grad_ln_out, grad_weight = linear_backward(grad, ln_out.to(grad.dtype), weight, module)
        if grad_given is not None:
            is_whole = module.sequence_parallel and module.return_layernorm_output_gathered
            grad_ln_out = grad_ln_out + (scatter(grad_given, module) if is_whole else grad_given)
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in (inp, gamma, beta) if each is not None]
            x, g, b = (*leaves, None)[:3]
            y = normalize(x, g, b, module.eps, module.zero_centered_gamma, module.normalization)
        grads = torch.autograd.grad(y, leaves, grad_ln_out)
        return *(*grads, None)[:3], grad_weight, None


def normalize(x: Tensor, gamma: Tensor, beta: Any, eps: float, is_zero_centered: bool, normalization: str) -> Tensor:
    gamma = gamma + 1 if is_zero_centered else gamma
    if normalization == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], gamma, eps)
    return F.layer_norm(x, x.shape[-1:], gamma, beta, eps)


class _Norm(_HasExtraState):
    """`LayerNorm` and `RMSNorm`: operations of `ops` since 1.13, which have an extra state."""

    normalization = ""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cpu",
        hidden_size: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        size = normalized_shape if hidden_size is None else hidden_size  # the former name
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(start(size, dtype=params_dtype, device=device))
        self.bias = None
        if self.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(size, dtype=params_dtype, device=device))
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, self.weight, self.bias, self.eps, self.zero_centered_gamma, self.normalization)


class LayerNorm(_Norm):
    normalization = "LayerNorm"


class RMSNorm(_Norm):
    normalization = "RMSNorm"


class DotProductAttention(_HasExtraState):
    """torch's attention on [s, b, a, d]."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        softmax_scale: float | None = None,
        window_size: tuple[int, int] | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.window_size = window_size
        self.attention_dropout, self.softmax_scale = attention_dropout, softmax_scale
        self.attn_mask_type = attn_mask_type
        self.register_load_state_dict_post_hook(_forget_extra_state)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, attn_mask_type: Any = None, **_: Any
    ) -> Tensor:
        mask_type = attn_mask_type or self.attn_mask_type
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        uses_mask = "padding" in mask_type or mask_type == "arbitrary"
        if self.window_size is not None:
            # A causal layer's window shows no token those after it, whatever its right side is.
            assert mask_type == "causal" and query.size(0) == key.size(0)
            ones = torch.ones(query.size(0), key.size(0), dtype=torch.bool)
            mask, uses_mask, mask_type = ~ones.tril().triu(-self.window_size[0]), True, "arbitrary"
        out = F.scaled_dot_product_attention(
            *(q, k, v),
            attn_mask=~mask if uses_mask else None,
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=mask_type == "causal",
            scale=self.softmax_scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def _forget_extra_state(_: Any, incompatible_keys: Any) -> None:
    for key in [key for key in incompatible_keys.missing_keys if "core_attention._extra_state" in key]:
        incompatible_keys.missing_keys.remove(key)


class GELU(_HasExtraState):
    """The operation of `ops`, which is the tanh form."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class _Absent:
    """In the place of what no test here uses."""


class _Package(types.ModuleType):
    """A module whose unknown names are classes that do nothing, as far as Megatron imports them."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _TRIED:
            raise AttributeError(name)
        return _Absent


# Names that Megatron tries, with a way to do without.
_TRIED = {"_SplitAlongDim", "cpu_offload", "cpu_offload_v1", "parallel_cross_entropy", "general_gemm", "ep"}

_MODULES = (
    "common common.recipe pytorch pytorch.attention pytorch.attention.rope pytorch.constants pytorch.cpp_extensions "
    "pytorch.distributed pytorch.float8_tensor pytorch.fp8 pytorch.graph pytorch.module pytorch.module.base "
    "pytorch.ops pytorch.optimizers pytorch.tensor pytorch.tensor.utils pytorch.utils pytorch.quantization "
    "pytorch.permutation"
).split()


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def install() -> None:
    """Put the stand-in into sys.modules. Before anything imports megatron.core."""
    assert "megatron.core" not in sys.modules, "install the stand-in before megatron.core is imported"
    root = _Package("transformer_engine")
    root.__version__ = VERSION  # type: ignore[attr-defined]
    found = {"": root}
    for name in _MODULES:
        found[name] = module = _Package(f"transformer_engine.{name}")
        parent, _, last = name.rpartition(".")
        setattr(found[parent], last, module)
    for cls in (Linear, LayerNormLinear, LayerNorm, RMSNorm, DotProductAttention):
        setattr(found["pytorch"], cls.__name__, cls)
    found["pytorch.ops"].GELU = GELU  # type: ignore[attr-defined]
    for name in ("pytorch.fp8", "pytorch.quantization"):
        found[name].FP8GlobalStateManager = FP8GlobalStateManager  # type: ignore[attr-defined]
    found["pytorch.utils"].torch_version = torch.__version__  # type: ignore[attr-defined]
    sys.modules.update({module.__name__: module for module in found.values()})
    tex = _Package("transformer_engine_torch")
    sys.modules["transformer_engine_torch"] = tex
