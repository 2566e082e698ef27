"""What FlashAttention-2's kernels, as torch has them, execute for a tile: counted in libtorch_cuda.so, as ours are.

Its launchers (csrc/flash_attn/src/flash_fwd_launch_template.h and flash_bwd_launch_template.h of
Dao-AILab/flash-attention) choose the tiles of TRAITS where a program can have 144 KiB of shared memory, and in backward
one program for each block of keys, all of which add to one sum of grad_q.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roofline import machine_code
from roofline.launches import TOOLS
from roofline.model import ARCHITECTURES, CENTRAL, SCHEDULERS, find_occupancy
from roofline.walks import LENGTH, PRODUCT_SHARES

TRAITS = {
    ("forward", 64, False): (128, 128, 4),
    ("forward", 64, True): (128, 64, 4),
    ("forward", 128, False): (128, 64, 4),
    ("forward", 128, True): (128, 32, 4),
    ("backward", 64, False): (128, 128, 8, 4, 4, 4),
    ("backward", 64, True): (128, 128, 8, 4, 4, 4),
    ("backward", 128, False): (64, 128, 8, 2, 4, 2),
    ("backward", 128, True): (64, 128, 8, 2, 4, 2),
}
"""{(pass, head_dim, with dropout): queries and keys of a tile, warps, and backward's layouts of warps}."""
KERNELS = {
    "forward": ("flash_fwd_kernel", "fwd", "Lb0ELb0E"),
    "backward": ("flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "bwd", "Lb0E"),
}


def count(library: Path) -> Iterator[dict[str, Any]]:
    """Records as walks.find_walk takes them, in bfloat16, neither causal nor masked, for sm_90."""
    names = {_find_symbol(*key): key for key in TRAITS}
    command = [TOOLS / "cuobjdump", "-sass", "-arch", "sm_90", "-fun", ",".join(names), library]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    listings = dict(re.findall(r"Function : (\w+)\n(.*?)\n\s*\.{10}", done.stdout, re.DOTALL))
    if missing := names.keys() - listings.keys():
        raise ValueError(f"{library} has no {', '.join(sorted(missing))} for sm_90; these are torch 2.11's")
    flops_per_cycle = PRODUCT_SHARES[CENTRAL] * ARCHITECTURES[90].product_flops / SCHEDULERS
    for symbol, (walk, head_dim, dropout) in names.items():
        queries, keys, warps = TRAITS[walk, head_dim, dropout][:3]
        body = machine_code.find_body(machine_code.parse(listings[symbol]))
        registers = 1 + max(int(number) for number in re.findall(r"\bR(\d+)\b", listings[symbol]))
        shared_bytes = 2 * head_dim * (queries + 2 * keys)  # more in backward, which registers limit
        yield {
            "walk": walk,
            "head_dim": head_dim,
            "dropout": dropout,
            "tile": [queries, keys],
            "warps": warps,
            "programs_per_sm": find_occupancy(registers, warps, shared_bytes, 90).programs,
            "splits": LENGTH // keys if walk == "backward" else 1,
            "sums": 1,
            "issued": body.issued,
            "shadow": round(body.find_shadow(flops_per_cycle)),
            "others": body.others,
            "around": body.around,
            "barriers": body.barriers,
            "instructions": dict(body.by_pipe),
        }


def _find_symbol(walk: str, head_dim: int, dropout: bool) -> str:
    """The mangled name; of the kernel's own flags dropout varies, and lengths and head_dim fit the tiles."""
    kernel, short, more = KERNELS[walk]
    queries, keys, warps, *layouts = TRAITS[walk, head_dim, dropout]
    numbers = "".join(f"Li{number}E" for number in (head_dim, queries, keys, warps))
    traits = f"23Flash_{short}_kernel_traitsI{numbers}{''.join(f'Li{number}E' for number in layouts)}Lb0ELb0E"
    base = f"N7cutlass10bfloat16_tE19Flash_kernel_traitsI{numbers}S3_EE"
    flags = f"Lb{int(dropout)}ELb0ELb0ELb0ELb1ELb1E{more}"
    parameters = f"NS_16Flash_{short}_paramsE"
    return f"_ZN13pytorch_flash{len(kernel)}{kernel}I{traits}{base}{flags}EEv{parameters}"
