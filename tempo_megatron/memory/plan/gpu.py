"""Reads how fast a GPU multiplies matrices and moves bytes, and its chip: the files of configs/gpu.

torch is imported only where a GPU is asked, as `--help` reads this file.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

_FOLDERS = Path(__file__).parents[3], Path(sysconfig.get_path("data")) / "share" / "tempo-megatron"
"""A checkout's, and what a wheel installs."""
DTYPES = ("bf16", "fp16", "fp32")
_UNKNOWN_DEVICE = "h100"


@dataclasses.dataclass(frozen=True)
class Chip:
    """What kernels choose their launches by: the major number of its compute capability, and its multiprocessors."""

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
        each = self.to_host_bytes_per_second, self.to_gpu_bytes_per_second
        return each[0] / self.gpus_per_uplink, each[1] / self.gpus_per_uplink


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


def list_configs(kind: str) -> dict[str, Path]:
    """Name -> JSON file of a folder of configs: "gpu" or "model"."""
    folders = [folder / "configs" / kind for folder in _FOLDERS]
    return {path.stem: path for folder in reversed(folders) for path in sorted(folder.glob("*.json"))}


def find_gpu(device_name: str | None) -> Gpu:
    """The rates of the device with this name of torch's; those of an H100 where no file fits, or there is no device."""
    return recognise_gpu(device_name or "") or read_gpu(_UNKNOWN_DEVICE)


def recognise_gpu(device_name: str) -> Gpu | None:
    """The rates of the device with this name of torch's; None where no file fits."""
    # A GB200 is no B200.
    names = sorted(list_configs("gpu"), key=len, reverse=True)
    found = next((name for name in names if name in device_name.lower().replace(" ", "")), None)
    return None if found is None else read_gpu(found)


def read_gpu(name: str) -> Gpu:
    """Read the GPU of a file, given by its name in configs/gpu (`h100`) or by its path.

    Raises ValueError where there is no such file, naming the nearest known GPU, and where the file describes no GPU.
    """
    known = list_configs("gpu")
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
    link, chip = content.get("host_link"), content.get("chip")
    return Gpu(**{**content, "host_link": link and HostLink(**link), "chip": chip and Chip(**chip)})


def _check_content(path: Path, content: Any) -> None:
    def has_names(value: Any, names: Iterable[str]) -> bool:
        return isinstance(value, dict) and sorted(value) == sorted(names)

    def refuse(name: str, value: Any, expected: str) -> NoReturn:
        raise ValueError(f"--gpu {path}: {name} is {value!r}; expected {expected}")

    fields, of_link, of_chip = ([field.name for field in dataclasses.fields(kind)] for kind in (Gpu, HostLink, Chip))
    if not isinstance(content, dict) or not has_names({"host_link": None, "chip": None, **content}, fields):
        raise ValueError(f"--gpu {path} does not describe a GPU; expected an object of {', '.join(fields)}")
    numbers: dict[str, Any] = {"bytes_per_second": content["bytes_per_second"]}
    for name, names in (("matmul_flops_per_second", DTYPES), ("host_link", of_link), ("chip", of_chip)):
        part: Any = content.get(name)
        if has_names(part, names):
            numbers |= {f"{name}.{each}": part[each] for each in names if each not in ("title", "source")}
        elif part is not None or names is DTYPES:
            refuse(name, part, f"an object of {', '.join(names)}{'' if names is DTYPES else ', or null'}")
    for name, number in numbers.items():
        is_whole = name.startswith("chip.") or name == "host_link.gpus_per_uplink"
        is_number = isinstance(number, int if is_whole else int | float) and not isinstance(number, bool)
        if not is_number or not 0 < number < float("inf"):
            refuse(name, number, f"a {'whole number of at least 1' if is_whole else 'positive number'}")
