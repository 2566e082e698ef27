"""nn.MultiheadAttention, and modules that call F.scaled_dot_product_attention, as nanoGPT and timm write them, under
tempoize: stock's function with a mask by position, and no s*s tensor."""

from __future__ import annotations

import copy
import gc
import weakref
import zlib
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from witness import assert_all_within_rule, kept_storages

from tempo_kernels.philox import derive_key, drop_mask, effective_probability
from tempo_megatron.memory.tape.scopes import record_saved
from tempo_torch import report_on, samples, tempoize

B, SQ, SK, E, HEADS = 4, 48, 65, 64, 4
SEED, FIRST, P = 7, 11, 0.25
_random = torch.Generator().manual_seed(1)
CAUSAL = torch.ones(SQ, SQ, dtype=torch.bool).triu(1)
RANDOM = (torch.rand(B * HEADS, SQ, SK, generator=_random) < 0.3) & (torch.arange(SK) > 0)
PADDING = torch.arange(SK) >= torch.tensor([[65], [50], [14], [2]])


def make_float(mask):
    return torch.zeros(mask.shape).masked_fill(mask, float("-inf"))


FIRST_DIM = {"batch_first": True}
FLOATS = {"attn_mask": make_float(CAUSAL), "key_padding_mask": make_float(PADDING[:, :SQ]), "is_causal": True}
# Arguments of the module, lengths of the query and of the keys, what a call is given besides.
CALLS = {
    "self attention": ({"batch_first": True}, SQ, SQ, {}),
    "sequence first": ({}, SQ, SQ, {}),
    "no bias": ({"bias": False}, SQ, SQ, {}),
    "causal": ({"batch_first": True}, SQ, SQ, {"attn_mask": CAUSAL, "is_causal": True}),
    "causal by its mask": ({"batch_first": True}, SQ, SQ, {"attn_mask": CAUSAL}),
    "a causal float mask and padding": (FIRST_DIM, SQ, SQ, FLOATS),
    "padding": ({"batch_first": True}, SQ, SK, {"key_padding_mask": PADDING}),
    "a mask per head": ({}, SQ, SK, {"attn_mask": RANDOM}),
    "a mask per head and padding": ({"batch_first": True}, SQ, SK, {"attn_mask": RANDOM, "key_padding_mask": PADDING}),
    "other widths": ({"batch_first": True, "kdim": 48, "vdim": 80}, SQ, SK, {}),
}


def make_inputs(settings, num_queries, num_keys):
    torch.manual_seed(2)
    query = torch.randn(B, num_queries, E)
    if num_queries == num_keys:
        inputs = [query] * 3
    else:
        key = torch.randn(B, num_keys, settings.get("kdim", E))
        inputs = [query, key, torch.randn(B, num_keys, settings["vdim"]) if "vdim" in settings else key]
    if settings.get("batch_first"):
        return inputs
    swapped = {id(t): t.transpose(0, 1).contiguous() for t in inputs}
    return [swapped[id(t)] for t in inputs]


def drop_by_definition(weights, p):
    """F.dropout of probabilities [b*a, sq, sk] by the mask from its definition."""
    rows, of_heads = torch.arange(weights.size(1)), torch.arange(HEADS).view(-1, 1)
    of_samples = torch.arange(FIRST, FIRST + B).view(-1, 1, 1)
    where = {"sample": of_samples, "head": of_heads, "row": rows, "num_columns": weights.size(2)}
    dropped = drop_mask(derive_key(SEED, zlib.crc32(b""), 0), p, **where)
    return weights * ~dropped.flatten(0, 1) / (1 - effective_probability(p))


def run(module, inputs, dtype, **more):
    """The output, the gradients of the distinct inputs and those of the parameters."""
    distinct = {id(t): t.detach().to(dtype).requires_grad_() for t in inputs}
    for name, mask in more.items():
        more[name] = mask.to(dtype) if isinstance(mask, torch.Tensor) and mask.is_floating_point() else mask
    out = module(*(distinct[id(t)] for t in inputs), **more)[0]
    module.zero_grad(set_to_none=True)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(grad.to(dtype))
    return [out.detach(), *(t.grad for t in distinct.values()), *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients_are_stocks_with_the_mask_by_position(name):
    settings, num_queries, num_keys, more = CALLS[name]
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(E, HEADS, P, **settings)
    if stock.in_proj_bias is not None:
        nn.init.normal_(stock.in_proj_bias)
    ours, exact = tempoize(copy.deepcopy(stock), seed=SEED, attention="flash"), copy.deepcopy(stock).double()
    inputs = make_inputs(settings, num_queries, num_keys)
    with samples(ours, FIRST):
        found = run(ours, inputs, torch.float32, **more, need_weights=False)
    with mock.patch.object(F, "dropout", drop_by_definition):  # torch's own, which then is our definition
        same = run(stock, inputs, torch.float32, **more)
        true = run(exact, inputs, torch.float64, **more)
    assert_all_within_rule(name, found, same, true)


def test_queries_that_see_no_key_are_given_zeros_as_in_stock():
    hidden = torch.zeros(B, SQ, dtype=torch.bool)
    hidden[1] = True
    stock = nn.MultiheadAttention(E, HEADS, P, batch_first=True)
    ours = tempoize(copy.deepcopy(stock), attention="flash")
    nn.init.ones_(stock.out_proj.bias), nn.init.ones_(ours.out_proj.bias)
    x = make_inputs({"batch_first": True}, SQ, SQ)[0].requires_grad_()
    for mask in (hidden, make_float(hidden)):
        outs = [each(x, x, x, key_padding_mask=mask, need_weights=False)[0] for each in (stock, ours)]
        assert all(torch.equal(out[1], torch.ones(SQ, E)) and not torch.equal(out[0], out[1]) for out in outs)
        (grad,) = torch.autograd.grad(outs[1].sum(), x)
        assert not grad[1].any() and grad[0].any()


def build_layers(p, norm_first=False):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(E, HEADS, 48, p, F.gelu, batch_first=True, norm_first=norm_first)
    decoder = nn.TransformerDecoderLayer(E, HEADS, 48, p, batch_first=True, norm_first=norm_first)
    return Layers(nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False), nn.TransformerDecoder(decoder, 2))


class Layers(nn.Module):
    """torch's encoder, with padding, and its decoder, which is causal."""

    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder, self.checkpoints = encoder, decoder, None

    def forward(self, x):
        padding, mask = PADDING[: x.size(0)], nn.Transformer.generate_square_subsequent_mask(SK, dtype=x.dtype)
        memory = self.encoder(x, src_key_padding_mask=padding)
        for layer in self.decoder.layers:
            more = {"tgt_mask": mask, "memory_key_padding_mask": padding, "tgt_is_causal": True}
            x = layer(x, memory, **more) if self.checkpoints is None else checkpoint(layer, x, memory, **more | LATER)
        return x


LATER = {"use_reentrant": False, "preserve_rng_state": False}


def differentiate(model, dtype=torch.float32):
    x = torch.randn(B, SK, E, generator=torch.Generator().manual_seed(4)).to(dtype)
    out = model(x)
    model.zero_grad(set_to_none=True)
    (out * torch.linspace(-1, 1, E, dtype=dtype)).sum().backward()
    return [out.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_layers_that_drop_nothing_are_stocks(norm_first):
    # A probability that rounds to 0 runs Tempo's attention, and a written 0 stock's.
    stock = differentiate(build_layers(0.0, norm_first))
    exact = differentiate(build_layers(0.0, norm_first).double(), torch.float64)
    for p, attention in ((1e-6, "flash"), (0.0, "auto")):
        found = differentiate(tempoize(build_layers(p, norm_first), attention=attention))
        assert_all_within_rule(f"of {p}", found, stock, exact)


def test_torchs_layers_draw_by_position_and_move_no_generator():
    ours, again = (tempoize(build_layers(0.1), seed=3) for _ in range(2))
    again.checkpoints = True
    found = []
    for model in (ours, again, ours):
        state = torch.get_rng_state()
        with samples(model, 20):
            found.append(differentiate(model))
        assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))
    assert not torch.equal(differentiate(ours)[0], found[0][0])  # other samples
    entries = [entry for entry in report_on(ours).entries if entry.operation == "attention"]
    assert len(entries) == 6 and {(entry.module, entry.now) for entry in entries} == {("MultiheadAttention", "flash")}


def test_kept_are_q_k_v_the_output_and_a_logsumexp():
    x = torch.randn(2, 64, E, requires_grad=True)
    stock = nn.MultiheadAttention(E, HEADS, 0.1, batch_first=True)
    ours, kept = tempoize(copy.deepcopy(stock)), []
    ours(x, x, x, need_weights=False)  # the first forward is watched by one without memory
    for model in (stock, ours):
        held = kept_storages(lambda x, model=model: model(x, x, x, need_weights=False)[0], x)
        for tensor in (x, *model.parameters()):
            held.pop(tensor.untyped_storage().data_ptr(), None)
        kept.append(sum(held.values()))
    tokens = 2 * 64
    assert kept[1] == 4 * (3 + 1) * tokens * E + 4 * HEADS * tokens
    assert kept[0] > kept[1] + 4 * HEADS * tokens * 64  # s*s tensors


BIAS = torch.linspace(0, 1, SQ * SQ).view(SQ, SQ)
REFUSALS = {
    "returns its weights (need_weights=True)": ({}, {"need_weights": True}),
    "appends bias_k and bias_v to its keys and values": ({"add_bias_kv": True}, {}),
    "appends a zero to its keys and values": ({"add_zero_attn": True}, {}),
    "adds a tensor to its scores": ({}, {"attn_mask": BIAS}),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_what_tempos_attention_does_not_do_stays_stock_or_is_refused(why):
    settings, more = REFUSALS[why]
    x, more = torch.randn(B, SQ, E), {"need_weights": False, **more}
    stock = nn.MultiheadAttention(E, HEADS, P, batch_first=True, **settings)
    found = []
    for model in (stock, ours := tempoize(copy.deepcopy(stock))):
        torch.manual_seed(5)
        found.append(model(x, x, x, **more)[0])
    assert torch.equal(*found)
    left = [(entry.operation, entry.why) for entry in report_on(ours).left if entry.operation != "loss"]
    assert left == [("attention", f"it {why}")], str(report_on(ours))
    with pytest.raises(ValueError) as raised:
        tempoize(copy.deepcopy(stock), attention="flash")(x, x, x, **more)
    assert str(raised.value).startswith('attention is "flash", but ') and f" {why}" in str(raised.value)


def test_scores_that_a_function_adds_to_stay_stock_or_are_refused():
    x, why = torch.randn(2, LENGTH, HIDDEN), "adds a tensor to its scores"
    ours, flash = (tempoize(build_own(mask=torch.zeros(LENGTH, LENGTH)), attention=each) for each in ("auto", "flash"))
    ours(x)
    assert why in str(report_on(ours))
    with pytest.raises(ValueError, match=f'attention is "flash".*{why}'):
        flash(x)


def test_masks_that_do_not_fit_end_in_stocks_words():
    model, x = tempoize(nn.MultiheadAttention(E, HEADS, P, batch_first=True)), torch.randn(B, SQ, E)
    with pytest.raises(RuntimeError, match="The shape of the 2D attn_mask is"):
        model(x, x, x, need_weights=False, attn_mask=CAUSAL[:1])
    with pytest.raises(AssertionError, match="only bool and floating types of attn_mask"):
        model(x, x, x, need_weights=False, attn_mask=CAUSAL.int())


@pytest.mark.parametrize(("dtype", "hides"), [(torch.bool, True), (torch.float32, float("-inf"))])
def test_a_mask_that_is_written_to_is_read_again_and_masks_of_past_steps_are_freed(dtype, hides):
    model, x = tempoize(nn.MultiheadAttention(E, HEADS, P, batch_first=True), attention="flash"), torch.randn(B, SQ, E)
    outs, masks = [], [torch.zeros(B, SQ, dtype=dtype) for _ in range(2)]

    def run(mask):
        with samples(model, 0):
            return model(x, x, x, key_padding_mask=mask, need_weights=False)[0]

    for mask in masks:
        outs.append(run(mask))
        mask[:, 1:] = hides
        outs.append(run(mask))
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3]) and not torch.equal(outs[0], outs[1])
    if dtype != torch.bool:
        mask[:, 0] = 3.0
        with pytest.raises(ValueError, match="MultiheadAttention adds a tensor to its scores"):
            run(mask)
    held = [weakref.ref(mask) for mask in masks]
    del mask, masks
    gc.collect()
    assert all(each() is None for each in held)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_evaluation_is_bit_for_bit_stocks_on_nested_tensors_too():
    layer = nn.TransformerEncoderLayer(E, HEADS, 48, 0.1, batch_first=True)
    stock = nn.TransformerEncoder(layer, 2).eval()
    x, attention = torch.randn(B, SK, E), stock.layers[0].self_attn
    ours = tempoize(copy.deepcopy(stock), norm="off").eval()
    with torch.no_grad():
        for padding in (None, PADDING):
            expected = stock(x, src_key_padding_mask=padding)
            assert torch.equal(ours(x, src_key_padding_mask=padding), expected)
            assert expected.shape == tempoize(copy.deepcopy(stock)).eval()(x, src_key_padding_mask=padding).shape
        for weights in (False, True):  # its own fast path
            found = ours.layers[0].self_attn(x, x, x, need_weights=weights)
            expected = attention(x, x, x, need_weights=weights)
            assert found[1] is expected[1] is None or torch.equal(found[1], expected[1])
            assert torch.equal(found[0], expected[0])


HIDDEN, LENGTH = 32, 40


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class OwnAttention(nn.Module):
    """`mask` is None for causal, or added or bool."""

    def __init__(self, p, mask):
        super().__init__()
        self.norm, self.qkv, self.out = OwnNorm(), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.p, self.mask = p, mask

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        more = {"dropout_p": self.p if self.training else 0.0, "is_causal": self.mask is None}
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, self.mask, **more)
        return x + self.out(y.transpose(1, 2).contiguous().view(b, s, h))


def build_own(p=0.5, mask=None):
    torch.manual_seed(0)
    return nn.Sequential(OwnAttention(p, mask), OwnAttention(p, mask)).train()


def keeps_scores(model, x):
    """Whether a tensor as large as [b, a, s, s] is held for backward."""
    _, kept = record_saved(model, lambda: model(x))
    return max(saved.num_bytes for saved in kept) >= x.size(0) * HEADS * LENGTH * LENGTH * 4


BOOL = torch.rand(1, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.7


@pytest.mark.parametrize("mask", [None, BOOL, BOOL[0, 0]], ids=["causal", "mask", "mask of two dimensions"])
def test_the_mask_of_a_sample_depends_on_no_other_and_no_scores_are_kept(mask):
    x = torch.randn(4, LENGTH, HIDDEN, requires_grad=True)
    model = tempoize(build_own(mask=mask), seed=1)
    with samples(model, 8):
        whole = model(x)
    assert not keeps_scores(model, x) and keeps_scores(build_own(mask=mask), x)
    for first in (0, 2):
        with samples(model, 8 + first):
            torch.testing.assert_close(model(x[first : first + 2]), whole[first : first + 2], rtol=1e-5, atol=1e-6)
    with samples(model, 9):
        assert not torch.allclose(model(x), whole)
    report = str(report_on(model))
    assert "replaced  attention  OwnAttention  flash" in report.replace("   ", "  ")
    assert report.count("OwnNorm") == 1 and "inplace" in report and "no eps" not in report  # which its code has


@pytest.mark.parametrize("mask", [None, BOOL], ids=["causal", "mask"])
def test_functions_that_drop_nothing_are_stocks(mask):
    x, stock = torch.randn(2, LENGTH, HIDDEN), build_own(p=0.0, mask=mask)
    for p in (0.0, 1e-6):  # of which 16 bits drop none, but Tempo's attention runs
        ours = tempoize(build_own(p=p, mask=mask), seed=1)
        torch.testing.assert_close(ours(x), stock(x), rtol=1e-5, atol=1e-5)


def test_a_norm_over_channels_is_not_taken_for_one_over_the_last_dimension():
    model = nn.Sequential(nn.GroupNorm(1, 8), nn.Linear(8, 8)).train()
    with torch.no_grad():
        model[0].weight.uniform_(0.5, 1.5)
    x = torch.randn(2, 8, 8)
    expected = model(x)
    torch.testing.assert_close(tempoize(model, seed=1)(x), expected)
