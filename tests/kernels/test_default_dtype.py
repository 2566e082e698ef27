"""torch.set_default_dtype changes no result: every tensor that is allocated names its dtype."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from activations import ACTIVATIONS
from covering import parametrize_covering
from torch import Tensor

from tempo_kernels.attention import attention
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import cpu as gelu_cpu
from tempo_kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("kernels/tempo_kernels", "tempo_megatron") for path in (ROOT / folder).rglob("*.py"))
# torch's functions that, without a dtype, take the default one for numbers that are not integers.
ALLOCATE = set(
    "arange as_tensor empty empty_strided eye full linspace logspace ones rand randint randn randperm range "
    "scalar_tensor tensor zeros".split()
)


def nameless_allocations(source: str) -> Iterator[str]:
    """Calls of torch.empty and its like without a dtype."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ALLOCATE:
            is_torchs = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if is_torchs and not any(keyword.arg in ("dtype", None) for keyword in node.keywords):
                yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_allocation_names_its_dtype(path: Path) -> None:
    assert not list(nameless_allocations(path.read_text(encoding="utf-8")))


def test_an_allocation_without_a_dtype_is_found() -> None:
    source = "a = torch.zeros(3, device=d)\nb = torch.zeros(3, dtype=torch.float32)\nc = x.new_zeros(3)"
    assert list(nameless_allocations(source)) == ["line 1: torch.zeros(3, device=d)"]


def attend(x: Tensor, form: str = "flash") -> Tensor:
    q = x.view(x.size(0), x.size(1), 2, -1)
    lengths = torch.tensor([5, 9], dtype=torch.int64)
    return attention(
        q, q, q, causal=True, softmax_scale=0.3, dropout_p=0.1, dropout_key=3, key_lengths=lengths, form=form
    )


def losses(x: Tensor, is_weighted: bool = False, is_log_prob: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(50, x.size(2), dtype=torch.float32, generator=generator).to(x.dtype)
    labels = torch.randint(50, (x.size(1), x.size(0)), generator=generator, dtype=torch.int64)
    more = {"token_weights": torch.full(labels.shape, 0.3, dtype=torch.float32)} if is_weighted else {}
    if is_log_prob:
        return torch.cat(linear_log_prob(x, weight, labels, 0.7, 30.0, True, vocab_size=45, chunk_tokens=5))
    found = linear_cross_entropy(x, weight, labels, label_smoothing=0.1, z_loss=1e-3, chunk_tokens=5, **more)
    return found[0] if is_weighted else found


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    **ACTIVATIONS,
    "bias_dropout_add": lambda x, bias: bias_dropout_add(x, bias, x, p=0.1, key=7),
    "attention": lambda x, _: attend(x),
    "attention keeping its softmax": lambda x, _: attend(x, "softmax"),
    "linear_cross_entropy": lambda x, _: losses(x),
    "linear_cross_entropy with token_weights": lambda x, _: losses(x, True),
    "linear_log_prob": lambda x, _: losses(x, is_log_prob=True),
}


def results(name: str, dtype: torch.dtype, default: torch.dtype) -> list[Tensor | None]:
    """Output and gradients under a default dtype, of the same inputs every time."""
    generator = torch.Generator().manual_seed(0)
    x, bias = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
        for shape in ((11, 2, 32), (32,))
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    gelu_cpu._tables.clear()  # filled once per process
    try:
        y = OPERATIONS[name](x, bias)
        y.backward(torch.full_like(y, 0.7))
    finally:
        torch.set_default_dtype(before)
        gelu_cpu._tables.clear()
    return [y.detach(), x.grad, bias.grad]


@parametrize_covering(
    each={"default": [torch.bfloat16, torch.float16, torch.float64]},
    name=OPERATIONS.keys(),
    dtype=[torch.float32, torch.bfloat16, torch.float16, torch.float64],
)
def test_a_default_dtype_changes_no_bit(name: str, dtype: torch.dtype, default: torch.dtype) -> None:
    for found, wanted in zip(results(name, dtype, default), results(name, dtype, torch.float32), strict=True):
        assert (found is None and wanted is None) or (found.dtype == wanted.dtype and torch.equal(found, wanted))
