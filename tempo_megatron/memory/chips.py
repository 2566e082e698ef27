"""What kernels choose their launches by. torch is imported only where a GPU is asked, as `--help` reads this file."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU's chip: the major number of its compute capability, and its multiprocessors."""

    major: int
    multiprocessors: int


H100 = Chip(9, 132)


def find_chip() -> Chip:
    """This machine's; an H100's where it has no GPU."""
    import torch

    if not torch.cuda.is_available():
        return H100
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Chip(found.major, found.multi_processor_count)
