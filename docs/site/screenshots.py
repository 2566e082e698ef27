"""Photographs the HTML reports of the commands for the documents: `python docs/site/screenshots.py`.

Needs a Chromium (`apt-get install chromium`). Each picture is a part of a report of a model of configs/model.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

from tempo_megatron.cli import main

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "images"
SIZE = (1100, 640)
GPT2 = f"--model={ROOT / 'configs' / 'model' / 'gpt2_345m.json'}"
TINY = f"--model={ROOT / 'configs' / 'model' / 'gpt2_tiny.json'}"
# Command -> its words.
COMMANDS = {
    "ledger": [GPT2],
    "estimate": [GPT2, "--micro-batch-size=8", "--use-tempo", "--gpu-memory=16GiB"],
    "plan": [GPT2, "--micro-batch-size=8", "--gpu=h100", "--gpu-memory=12GiB"],
    "order": [TINY, "--use-tempo"],
}
# Picture -> the report that it is a part of, and which of its plots it begins at; None is the beginning of the page.
PICTURES = {"estimate": None, "plan": None, "ledger": 0, "timeline": -1, "order": 0}


def photograph() -> None:
    """Writes docs/images/report_*.png. Raises SystemExit where there is no Chromium."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from browser import Browser, find_chromium

    chromium = find_chromium()
    if chromium is None:
        raise SystemExit("no Chromium is found; apt-get install chromium")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for command, words in COMMANDS.items():
            main([command, *words, f"--html={folder / command}.html"])
        with Browser(chromium, folder / "profile") as browser:
            browser.resize(*SIZE)
            for picture, plot in PICTURES.items():
                report = "ledger" if picture == "timeline" else picture
                browser.open((folder / f"{report}.html").as_uri())
                browser.wait_for('document.querySelectorAll(".js-plotly-plot .main-svg .trace").length')
                if plot is not None:
                    browser.ask(f"[...document.querySelectorAll('h2')].at({plot}).scrollIntoView()")
                file = FOLDER / f"report_{picture}.png"
                browser.photograph(file)
                Image.open(file).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(file, optimize=True)


if __name__ == "__main__":
    photograph()
