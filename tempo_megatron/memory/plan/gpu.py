"""Reads how fast a GPU multiplies matrices and moves bytes: the files of configs/gpu."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sysconfig
from pathlib import Path
from typing import Any

from tempo_megatron.memory.chips import Chip

FOLDERS = (
    Path(__file__).parents[3] / "configs" / "gpu",
    Path(sysconfig.get_path("data")) / "share" / "tempo-megatron" / "configs" / "gpu",
)
"""A checkout's, and what a wheel installs."""

DTYPES = ("bf16", "fp16", "fp32")
_UNKNOWN_DEVICE = "h100"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostLink:
    """What joins a GPU to its host's memory."""

    title: str
    to_host_bytes_per_second: float
    """Of one GPU that copies alone, while it may copy the other way too."""

    to_gpu_bytes_per_second: float
    gpus_per_uplink: int
    """GPUs behind one switch, or at one CPU's link, that together get no more than one alone; 1 where none share."""

    source: str

    def share(self) -> tuple[float, float]:
        """Bytes per second to the host and to the GPU while all GPUs that share the uplink copy."""
        return (
            self.to_host_bytes_per_second / self.gpus_per_uplink,
            self.to_gpu_bytes_per_second / self.gpus_per_uplink,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """Rates of one GPU."""

    title: str
    calibrated: bool
    """Whether the rates were measured; else they are the data sheet's, which no program reaches."""
    source: str
    matmul_flops_per_second: dict[str, float]
    """dtype, one of DTYPES -> floating-point operations per second of dense products, two per multiply-add."""
    bytes_per_second: float
    """The bandwidth of the GPU's memory."""

    host_link: HostLink | None = None
    """None where a file says nothing of it: then no plan offloads."""

    chip: Chip | None = None
    """None where a file says nothing of it: then the run's is taken."""


def list_gpus() -> dict[str, Path]:
    """Name -> file of configs/gpu."""
    return {path.stem: path for folder in reversed(FOLDERS) for path in sorted(folder.glob("*.json"))}


def find_gpu(device_name: str | None) -> Gpu:
    """The rates of the device with this name of torch's; those of an H100 where no file fits, or there is no device."""
    return recognise_gpu(device_name or "") or read_gpu(_UNKNOWN_DEVICE)


def recognise_gpu(device_name: str) -> Gpu | None:
    """The rates of the device with this name of torch's; None where no file fits."""
    # A GB200 is no B200.
    for name in sorted(list_gpus(), key=len, reverse=True):
        if name in device_name.lower().replace(" ", ""):
            return read_gpu(name)
    return None


def read_gpu(name: str) -> Gpu:
    """Read the GPU of a file, given by its name in configs/gpu (`h100`) or by its path.

    Raises ValueError where there is no such file, naming the nearest known GPU, and where the file describes no GPU.
    """
    known = list_gpus()
    path = known.get(name.lower(), Path(name))
    if not path.is_file():
        nearest = difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=0.0)
        hint = f"; the nearest known one is {nearest[0]}" if nearest else ""
        raise ValueError(f"--gpu {name} is unknown{hint}: give {', '.join(sorted(known))} or a file like theirs")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--gpu {path} is not valid JSON ({error}); correct it") from error
    _check_content(path, content)
    link = content.get("host_link")
    chip = content.get("chip")
    return Gpu(**{**content, "host_link": link and HostLink(**link), "chip": chip and Chip(**chip)})


def _check_content(path: Path, content: Any) -> None:
    names = [field.name for field in dataclasses.fields(Gpu)]
    if not isinstance(content, dict) or sorted({"host_link": None, "chip": None, **content}) != sorted(names):
        raise ValueError(f"--gpu {path} does not describe a GPU; expected an object of {', '.join(names)}")
    rates = content["matmul_flops_per_second"]
    if not isinstance(rates, dict) or sorted(rates) != sorted(DTYPES):
        raise ValueError(f"--gpu {path}: matmul_flops_per_second is {rates!r}; expected rates of {', '.join(DTYPES)}")
    link = content.get("host_link")
    figures = {**rates, "bytes_per_second": content["bytes_per_second"]}
    if link is not None:
        names = [field.name for field in dataclasses.fields(HostLink)]
        if not isinstance(link, dict) or sorted(link) != sorted(names):
            raise ValueError(f"--gpu {path}: host_link is {link!r}; expected an object of {', '.join(names)}, or null")
        figures |= {f"host_link.{name}": link[name] for name in names if name not in ("title", "source")}
    chip = content.get("chip")
    if chip is not None:
        names = [field.name for field in dataclasses.fields(Chip)]
        if not isinstance(chip, dict) or sorted(chip) != sorted(names):
            raise ValueError(f"--gpu {path}: chip is {chip!r}; expected an object of {', '.join(names)}, or null")
        for name, number in chip.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"--gpu {path}: chip.{name} is {number!r}; expected a positive whole number")
    for name, rate in figures.items():
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < float("inf"):
            raise ValueError(f"--gpu {path}: {name} is {rate!r}; expected a positive number")
    if link is not None and not isinstance(link["gpus_per_uplink"], int):
        raise ValueError(
            f"--gpu {path}: host_link.gpus_per_uplink is {link['gpus_per_uplink']!r}; expected a whole number of GPUs"
        )
