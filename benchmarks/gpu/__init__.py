"""The parts of gpu_suite.py: what is measured, against whom, how, and how it is written down."""

import sys
from pathlib import Path

# This checkout's kernels, which need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))
