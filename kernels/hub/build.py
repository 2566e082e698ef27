"""Writes a local kernel package for Hugging Face's `kernels`: one folder of layers a device, in the layout of the Hub.

    python kernels/hub/build.py FOLDER

Then FOLDER:LAYER is what a mapping of transformers' KernelConfig takes, and `LocalLayerRepository` of `kernels`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

HERE = Path(__file__).parent
BACKENDS = ("cpu", "cuda", "rocm", "xpu")


def build(folder: Path) -> None:
    """Writes FOLDER/build/torch-BACKEND/{__init__.py, layers.py, metadata.json} for every backend."""
    text = (HERE.parent / "tempo_kernels" / "__init__.py").read_text(encoding="utf-8")
    (major,) = re.findall(r'^__version__ = "(\d+)', text, re.MULTILINE)
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        variant.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(HERE / "layers.py", variant / "layers.py")
        (variant / "__init__.py").write_text('"""Layers of Tempo."""\n\nfrom . import layers\n\n__all__ = ["layers"]\n')
        metadata = {
            "id": f"_tempo_{backend}",
            "name": "tempo",
            "version": int(major),
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a local kernel package for Hugging Face's kernels.")
    parser.add_argument("folder", type=Path, help="where it goes; files of an earlier build there are replaced")
    folder = parser.parse_args().folder.resolve()
    build(folder)
    print(f'{folder}: for example {{"RMSNorm": "{folder}:RMSNorm"}} in a KernelConfig with use_local_kernel=True')


if __name__ == "__main__":
    main()
