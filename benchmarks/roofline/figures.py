"""What others published of their kernels' speed on an H100 SXM (and B200), and where; none was measured here."""

from __future__ import annotations

from typing import NamedTuple

FLASH_ATTENTION_3 = "Shah et al., arXiv 2407.08608, figures 5 and 6: 2048 tokens x 8, 2048 / d heads, no dropout"


class Speeds(NamedTuple):
    """TFLOP/s of attention in 16 bits; None where the figure shows none."""

    causal_forward: int
    forward: int
    backward: int | None

    @property
    def both(self) -> float | None:
        """Forward and backward together, not causal: 2 and 5 products."""
        return None if self.backward is None else 7 / (2 / self.forward + 5 / self.backward)


ATTENTION = {
    "FlashAttention-2": {64: Speeds(262, 318, 264), 128: Speeds(298, 362, 291)},
    "Triton's tutorial": {64: Speeds(342, 396, None), 128: Speeds(323, 389, None)},
    "cuDNN": {64: Speeds(334, 395, 395), 128: Speeds(484, 617, 465)},
    "FlashAttention-3": {64: Speeds(371, 460, 422), 128: Speeds(521, 625, 501)},
}
"""{whose: {head_dim: speeds}}, from FLASH_ATTENTION_3. The same number of heads times samples as in cases.py."""

BLACKWELL = {
    "FlashAttention-4, d 128, 8192 tokens x 4, 16 heads, forward": (1418, 1535),
    "FlashAttention-4, the same, backward": (1209, 1360),
}
"""TFLOP/s on a B200, causal and not, from pull request 2280 of Dao-AILab/flash-attention."""
BLACKWELL_BEST = "up to 1613 TFLOP/s, 1.3x cuDNN 9.13 and 2.7x Triton (Zadouri et al., arXiv 2603.05451)"

TRANSFORMER_ENGINE = {"cuDNN, which it prefers on sm_90": 0.3664, "flash-attn": 0.5850}
"""{backend: milliseconds of forward and backward} of Transformer Engine's attention on an H100 80GB: causal, d 128,
2048 tokens x 2, 16 heads, no dropout, from docs/examples/attention/attention.ipynb of NVIDIA/TransformerEngine at
0f60e599."""
TRANSFORMER_ENGINE_FLOPS = 7 * 2 * 2048**2 * 128 * 2 * 16 / 2
"""2 products of forward and 5 of backward, half of them under the causal limit."""

MEASURED_DROPOUT = {64: 12.4, 128: 1.0}
"""{head_dim: percent} by which dropout lengthens forward and backward together of FlashAttention's kernels for sm_120,
which take mma.sync, too: 2048 tokens x 2, 16 heads, not causal. The author of pull request 2439 of
Dao-AILab/flash-attention measured it on a GB10."""

TUTORIAL = {
    64: {
        "tile": (128, 64),
        "warps": 4,
        "programs_per_sm": 2,
        "issued": 509,
        "shadow": 104,
        "around": 600,
        "barriers": 3,
    },
    128: {
        "tile": (128, 64),
        "warps": 4,
        "programs_per_sm": 1,
        "issued": 633,
        "shadow": 165,
        "around": 900,
        "barriers": 3,
    },
}
"""Forward of python/tutorials/06-fused-attention.py of triton-lang/triton at 003da478 (without descriptors) by triton
3.6, float16: the counts by which the model is held against ATTENTION. `around`, the instructions before and after the
loop, and `barriers`, as many as our forward with pointers has by the same Triton, are estimates, the others counted, of
which one of 3 stages has the `shadow`."""

POINTWISE = (
    ("QuACK", "RMSNorm, softmax and cross entropy forward, rows from 4096 on", "3.0 TB/s", "Dao-AILab/quack, "
     "media/2025-07-10-membound-sol.md: 90 % of 3.35 TB/s"),
    ("Liger, torch.compile", "softmax forward", "about 2.0 TB/s from rows of 65536 on", "the same page"),
    ("Transformer Engine", "LayerNorm, RMSNorm, GELU", "none found", "for its attention see above"),
)  # fmt: skip
