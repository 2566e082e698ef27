"""Measures what the stand-in for Transformer Engine keeps, in its own process: `engine_cases.py JSON FILE...`.

The stand-in must be there before megatron.core is imported.
"""

from __future__ import annotations

import te_package

te_package.install()

import dataclasses  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from tempo_megatron.memory.show.stand_ins import measure_engine  # noqa: E402

if __name__ == "__main__":
    output, *files = map(Path, sys.argv[1:])
    output.write_text(json.dumps(dataclasses.asdict(measure_engine({file.stem: file for file in files}, "cpu"))))
