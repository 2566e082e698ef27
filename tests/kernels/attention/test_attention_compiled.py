"""The kernels of attention compiled ahead of time, each architecture with its own blocks; no GPU is needed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

from ahead_of_time import (
    compiled,
    count_serialised_products,
    list_spills_in_loops,
    narrow_accesses,
    record_launches,
    resources,
    source_of,
)
from covering import exhaustive
from ttir_ranges import find_overflows

from tempo_kernels.attention import kernel as attention_kernel
from tempo_kernels.attention import kernel_backward, kernel_forward
from tempo_kernels.attention.settings import Inputs, Kept, Settings

# sm_86, sm_89 and sm_120 run the tiles of sm_80, with less room than that has.
SHARED_BYTES = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}

pytestmark = pytest.mark.slow


def attention_launches(
    capability, head_dim, dtype=torch.bfloat16, given=(), s=2048, b=2, heads=4, value_dim=None, is_part=False, **chosen
):
    """The launches of forward, grad_q and grad_kv, of queries, keys and values that are slices of one tensor. `given`
    are Inputs' other tensors by name; a bias gets its gradient too."""
    given = dict(given)
    value_dim = value_dim or head_dim
    sizes = [head_dim, head_dim, value_dim]
    b = 1 if "cu_seqlens" in given else b
    q, k, v = torch.empty(s, b, heads, sum(sizes), dtype=dtype).split(sizes, dim=-1)
    settings = {"causal": True, "softmax_scale": 0.125, "dropout_p": 0.1, "dropout_key": 2**64 - 1}
    settings = Settings(**{**settings, "first_sample": 5, "first_head": 4, **chosen})
    out, logsumexp = torch.empty(s, b, heads, value_dim, dtype=dtype), torch.empty(b, heads, s)
    kept = Kept(out.float() if is_part else out, logsumexp, is_part=is_part)

    def run():
        inputs = Inputs(q, k, v, **given)
        attention_kernel.forward(inputs, settings, torch.float32 if is_part else None)
        attention_kernel.backward(out, inputs, kept, settings, inputs.bias is not None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_kernel, "get_architecture", lambda device: capability)
        return record_launches(run, [kernel_forward, kernel_backward])


# Of kernel.py's TILES the wider ones, which take more registers, as dropout does; on sm_90 each.
COMPILED = [(80, 128, 0.1), (90, 64, 0.1), (90, 128, 0.1), (100, 128, 0.1)]
ALL = [(capability, head_dim, p) for capability in (80, 90, 100) for head_dim in (64, 128) for p in (0.1, 0.0)]


@pytest.mark.parametrize(
    ("capability", "head_dim", "p"), [*COMPILED, *exhaustive(*(case for case in ALL if case not in COMPILED))]
)
def test_attention_keeps_to_registers_and_reads_16_bytes_at_a_time(capability, head_dim, p):
    """On sm_90, too, no product waits for the last."""
    for launch in attention_launches(capability, head_dim, dropout_p=p):
        name, kernel = launch[0].__name__, compiled(launch, capability)
        usage, spills = resources(kernel.asm["cubin"]), list_spills_in_loops(kernel.asm["cubin"])
        # Some numbers of before the loop, which are needed behind it, may wait in memory; few are read in it.
        few = head_dim == 128 and capability == 90 and len(spills) <= 6
        assert not spills or few, f"{name} spills: {spills}"
        assert usage["STACK"] <= 32 and usage["LOCAL"] == 0, f"{name} spills: {usage}"
        assert kernel.metadata.shared <= SHARED_BYTES[capability]
        # What is left is one number per query, logsumexp and delta, which Triton 3.6 copies as threads hold them,
        # 4 or 8 bytes at a time; a narrow tile would take many accesses.
        narrow = narrow_accesses(kernel.asm["ptx"])
        copies = sum(access.startswith("copy") for access in narrow)
        assert len(narrow) - copies <= 12 and copies <= 32, f"{name}: {narrow}"
        assert not any(access.endswith(".b16") for access in narrow), f"{name}: {narrow}"
        assert capability != 90 or count_serialised_products(kernel.asm["ptx"]) == 0, name


BOUNDARIES = torch.tensor([0, 700, 2048], dtype=torch.int32)
# What is other than in the tests above: heads of 128, bfloat16, causal, dropout.
OTHER_FORMS = {
    "packed": lambda: {"given": {"cu_seqlens": BOUNDARIES, "document_samples": torch.zeros(2, dtype=torch.int64)}},
    "packed by position": lambda: {"given": {"cu_seqlens": BOUNDARIES}},
    "part": lambda: {"is_part": True, "first_row": 1024, "first_column": 512},
    "sink": lambda: {"given": {"sink": torch.ones(4)}},
    "softcap": lambda: {"softcap": 50.0},
    "slopes": lambda: {"given": {"alibi_slopes": torch.ones(4)}},
    "bias": lambda: {"given": {"bias": torch.zeros(1, 4, 2048, 2048, dtype=torch.bfloat16)}},
}
MASKED = {"mask": torch.zeros(2, 1, 2048, 2048, dtype=torch.bool)}
# These may spill in their loops; multi-latent attention and masks lie in no local memory, however.
WIDE_FORMS = {
    "latent": lambda: {"head_dim": 192, "value_dim": 128, "first_row": 1024, "first_column": 512},
    **{
        f"masks, {rows}": lambda rows=rows: {
            "head_dim": 64, "given": MASKED, "window_size": (128, 0), "hidden_rows": rows
        } for rows in ("uniform", "added", "zero")
    },
    "heads of 256": lambda: {"head_dim": 256},
    "float32": lambda: {"dtype": torch.float32},
    "heads of 80": lambda: {"head_dim": 80, "dtype": torch.float16},
}  # fmt: skip
OFTEN = [(90, "packed"), (90, "part"), (80, "softcap")]
OFTEN += [(80, "latent"), (90, "masks, added"), (80, "heads of 256"), (80, "float32")]
SELDOM = [(c, form) for c in (80, 90, 100) for form in OTHER_FORMS | WIDE_FORMS if (c, form) not in OFTEN]
# In a loop of one to two thousand instructions.
MOST_SPILLS = 40


@pytest.mark.parametrize(("capability", "form"), [*OFTEN, *exhaustive(*SELDOM)])
def test_other_forms_fit_and_leave_their_loops_almost_without_spills(capability, form):
    for launch in attention_launches(capability, **{"head_dim": 128, **(OTHER_FORMS | WIDE_FORMS)[form]()}):
        name, kernel = launch[0].__name__, compiled(launch, capability)
        assert len(launch.kernel.arg_names) <= 20
        assert kernel.metadata.shared <= SHARED_BYTES[capability], name
        if form not in ("heads of 256", "float32", "heads of 80"):
            assert resources(kernel.asm["cubin"])["LOCAL"] == 0, name
        if form in OTHER_FORMS:
            spills = list_spills_in_loops(kernel.asm["cubin"])
            assert len(spills) <= MOST_SPILLS, f"{name}: {spills}"


@pytest.mark.parametrize("head_dim", [*exhaustive([64]), 128, *exhaustive([256])])
@pytest.mark.parametrize("capability", [80, *exhaustive([90], [100])])
def test_the_gradient_of_a_bias_keeps_to_registers(capability, head_dim):
    *_, launch = attention_launches(capability, head_dim, **OTHER_FORMS["bias"]())
    kernel = compiled(launch, capability)
    usage = resources(kernel.asm["cubin"])
    assert not list_spills_in_loops(kernel.asm["cubin"])
    assert usage["STACK"] <= 32 and usage["LOCAL"] == 0 and kernel.metadata.shared <= SHARED_BYTES[capability]
    assert capability != 90 or count_serialised_products(kernel.asm["ptx"]) == 0


@pytest.mark.parametrize("form", ["float32", "packed", "packed by position", "part", "changed scores"])
def test_no_number_of_32_bits_runs_over_in_rows_of_a_million_queries(form):
    with torch.device("meta"):
        changed = {"given": {"sink": torch.ones(4), "alibi_slopes": torch.ones(4)}, "softcap": 50.0}
        chosen = changed if form == "changed scores" else (OTHER_FORMS | WIDE_FORMS)[form]()
        launches = attention_launches(90, 128, s=1 << 20, **chosen)
    assert [find_overflows(launch) for launch in launches] == [[]] * len(launches)


def test_new_keys_and_samples_compile_nothing_again():
    launches = []
    for key, first_sample in ((1, 0), (2**63, 1), (2**31, 2**31 - 1), (0, 16)):
        launches += attention_launches(90, 64, dropout_key=key, first_sample=first_sample)
    assert len({source_of(launch).hash() for launch in launches}) == 3


def test_one_sample_one_head_and_one_query_compile():
    """Numbers of 1 are constants of the compiler."""
    for launch in attention_launches(90, 64, s=1, b=1, heads=1, first_head=1):
        assert compiled(launch, 90).metadata.shared <= SHARED_BYTES[90]
