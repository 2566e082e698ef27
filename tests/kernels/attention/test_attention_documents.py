"""Attention within the documents of a packed row against each document in a row of its own."""

from __future__ import annotations

import pytest
import torch
from attention_cases import FIRST_HEAD, KEY, SCALE
from covering import parametrize_covering
from witness import kept_storages

from tempo_kernels.attention import attention

TOKENS, HEADS, GROUPS = 36, 4, 2
NUMBERS = {"softmax_scale": SCALE, "dropout_key": KEY, "first_head": FIRST_HEAD}
BOUNDARIES = {
    "one": [0, 36],
    "several": [0, 5, 6, 20, 36],
    "padding around, an empty one": [1, 6, 6, 15, 33],
    "none": [4],
}


def pack(dtype=torch.float64, value_dim=8):
    sizes = (HEADS, 8), (GROUPS, 8), (GROUPS, value_dim)
    return [torch.randn(TOKENS, 1, *size, dtype=dtype, requires_grad=True) for size in sizes]


def as_int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def attend_alone(tensors, boundaries, attend):
    """[t, 1, a, dv]: attend(q, k, v, number, start) of each document, 0 elsewhere."""
    out = tensors[0].new_zeros(TOKENS, 1, HEADS, tensors[2].size(3))
    pieces = [out[: boundaries[0]]]
    for number, (start, end) in enumerate(zip(boundaries, boundaries[1:], strict=False)):
        pieces.append(attend(*(t[start:end] for t in tensors), number, start) if start < end else out[:0])
    return torch.cat([*pieces, out[boundaries[-1] :]])


@parametrize_covering(
    boundaries=BOUNDARIES.values(),
    dtype=[torch.float64, torch.float32, torch.bfloat16],
    form=["flash", "softmax"],
    p=[0.0, 0.3],
    is_announced=[True, False],
    seen=[(True, None), (False, None), (True, (3, 0)), (False, (2, 4))],
    value_dim=[8, 12],
    is_changed=[False, True],
)
def test_a_document_is_what_it_is_in_a_row_of_its_own(
    boundaries, dtype, form, p, is_announced, seen, value_dim, is_changed, nan_poison
):
    causal, window_size = seen
    tensors, grad = pack(dtype, value_dim), torch.randn(TOKENS, 1, HEADS, value_dim, dtype=dtype)
    samples = torch.randint(0, 2**40, (len(boundaries) - 1,), dtype=torch.int64)
    chosen = {**NUMBERS, "causal": causal, "window_size": window_size, "dropout_p": p, "form": form}
    sink = torch.randn(HEADS).to(torch.float32 if dtype == torch.float64 else dtype).requires_grad_()
    if is_changed:
        chosen |= {"sink": sink, "softcap": 1.5, "alibi_slopes": torch.tensor([0.5, 0.25, 0.0625, 0.3])}

    def attend(q, k, v, number, start):
        if is_announced:
            return attention(q, k, v, **chosen, first_sample=int(samples[number]))
        return attention(q, k, v, **chosen, first_sample=5, first_row=start, first_column=start)

    packed = {"cu_seqlens": as_int32(boundaries), "document_samples": samples if is_announced else None}
    found = attention(*tensors, **chosen, **packed, first_sample=5)
    found.backward(grad)
    grads = [t.grad for t in tensors]
    expected = attend_alone(tensors, boundaries, attend)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if len(boundaries) == 1:
        assert not any(g.any() for g in grads)
        return
    leaves = [*tensors, sink] if is_changed else tensors
    *expected_grads, last = torch.autograd.grad(expected, leaves, grad)
    if is_changed:
        # The sink's gradient is a sum over documents.
        torch.testing.assert_close(sink.grad, last, rtol=4 * torch.finfo(sink.dtype).eps, atol=1e-6)
    else:
        expected_grads.append(last)
    for grad_found, grad_expected in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad_found, grad_expected, rtol=0, atol=0)


def test_documents_may_have_more_keys_than_queries():
    tensors = pack()
    boundaries, key_boundaries = [0, 3, 20], [2, 9, 36]
    packed = {"cu_seqlens": as_int32(boundaries), "cu_seqlens_k": as_int32(key_boundaries)}
    samples = torch.tensor([7, 3])
    found = attention(
        tensors[0][:20], *tensors[1:], causal=True, dropout_p=0.3, document_samples=samples, **packed, **NUMBERS
    )
    for number, sample in enumerate(samples.tolist()):
        queries = slice(*boundaries[number : number + 2])
        keys = slice(*key_boundaries[number : number + 2])
        alone = tensors[0][queries], *(t[keys] for t in tensors[1:])
        expected = attention(*alone, causal=True, dropout_p=0.3, first_sample=sample, **NUMBERS)
        torch.testing.assert_close(found[queries], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "p", "outputs"), [(torch.bfloat16, 0.0, 1), (torch.bfloat16, 0.1, 0), (torch.float32, 0.0, 0)]
)
def test_keeps_what_an_unpacked_row_keeps_and_the_boundaries(dtype, p, outputs):
    tensors = pack(dtype)
    cu_seqlens, samples = as_int32([0, 5, 36]), torch.tensor([3, 1])
    packed = {"cu_seqlens": cu_seqlens, "document_samples": samples}
    kept = kept_storages(lambda: attention(*tensors, causal=True, dropout_p=p, **packed, **NUMBERS))
    of_tensors = sum(t.nbytes for t in (*tensors, cu_seqlens, samples))
    assert sum(kept.values()) == of_tensors + 4 * TOKENS * HEADS + outputs * tensors[0].nbytes


REFUSED = [
    ({"cu_seqlens": [0, 40]}, r"cu_seqlens is \[0, 40\]; expected .* at most 36, the tokens of q"),
    ({"cu_seqlens": [0, 9, 5]}, "growing from 0"),
    ({"cu_seqlens": [-1, 5]}, "growing from 0"),
    ({"cu_seqlens": []}, "expected torch.int32 of shape"),
    ({"cu_seqlens": torch.tensor([0, 36])}, r"cu_seqlens is torch.int64 .* expected torch.int32"),
    ({"cu_seqlens": [0, 36], "cu_seqlens_k": [0, 5, 36]}, r"cu_seqlens_k is .*\[3\].* expected .*\[2\]"),
    ({"cu_seqlens": [0, 36], "cu_seqlens_k": [0, 9]}, "more queries than keys"),
    ({"cu_seqlens": [0, 36], "cu_seqlens_k": [0, 36], "dropout_p": 0.1}, "give document_samples"),
    ({"cu_seqlens": [0, 36], "document_samples": torch.tensor([1, 2])}, "document_samples .* for 1 documents"),
    ({"document_samples": torch.tensor([1])}, "without cu_seqlens"),
    ({"cu_seqlens": [0, 36], "mask": torch.zeros(1, 1, 36, 36, dtype=torch.bool)}, "mask is given together"),
    ({"cu_seqlens": [0, 36], "first_row": 1}, "first_row is given together"),
    ({"cu_seqlens": [0, 36], "first_column": 0}, "first_column is given together"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_does_not_fit_is_refused(given, message):
    given = {name: as_int32(value) if isinstance(value, list) else value for name, value in given.items()}
    with pytest.raises(ValueError, match=message):
        attention(*pack(), causal=True, **NUMBERS, **given)
    if list(given) == ["cu_seqlens"]:
        with pytest.raises(ValueError, match="q has 2 samples and cu_seqlens is given"):
            attention(*(t.expand(-1, 2, -1, -1) for t in pack()), causal=True, **NUMBERS, **given)
