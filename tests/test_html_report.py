"""The HTML reports of the commands: one file, no network, and in a browser plots that can be zoomed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import Browser, find_chromium

from tempo_megatron.cli import main
from tempo_megatron.html_report import HtmlReport

ROOT = Path(__file__).parent.parent
TINY = f"--model={ROOT / 'configs' / 'model' / 'gpt2_tiny.json'}"
# Command -> its arguments, what its table has, and how many plots there are.
COMMANDS = {
    "ledger": (["--seq-length=64", "--stock=local"], ["one layer without s*s", "memory at the peak of one step"], 4),
    "estimate": (["--use-tempo", "--gpu-memory=1GiB"], ["GiB at the peak", "optimizer states"], 1),
    "plan": (
        ["--gpu=h100", "--gpu-memory=1GiB", "--fixed-memory=99MiB", "--recompute-allowed"],
        ["kept/micro batch"],
        1,
    ),
    "order": (["--seq-length=64"], ["peak of eager mode"], 1),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    found = {}
    for command, (arguments, _, _) in COMMANDS.items():
        found[command] = folder / "new" / f"{command}.html"
        assert main([command, TINY, *arguments, f"--html={found[command]}"]) == 0
    return found


@pytest.mark.slow
def test_a_report_is_one_file_with_the_table_and_its_plots(reports: dict[str, Path]) -> None:
    for command, (_, texts, num_plots) in COMMANDS.items():
        page = reports[command].read_text(encoding="utf-8")
        assert all(text in page for text in texts), command
        assert len(re.findall(r"<h2>", page)) == num_plots
        assert not re.search(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["']?(?:https?:)?//""", page), command
        assert not list(reports[command].parent.glob("*.tmp"))


@pytest.mark.slow
def test_a_browser_draws_the_plots_and_zooms(reports: dict[str, Path], tmp_path: Path) -> None:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no Chromium is found, in which the reports would be opened: apt-get install chromium")
    with Browser(chromium, tmp_path) as browser:
        for command, (_, _, num_plots) in COMMANDS.items():
            browser.open(reports[command].as_uri())
            drawn = 'document.querySelectorAll(".js-plotly-plot .main-svg .trace, .main-svg .barlayer .trace").length'
            assert browser.wait_for(drawn) and not browser.problems, (command, browser.problems)
            assert browser.ask('document.querySelectorAll(".js-plotly-plot").length') == num_plots
            plot = 'document.querySelector(".js-plotly-plot")'
            zoomed = f"Plotly.relayout({plot}, {{'yaxis.range': [0, 1]}}).then(() => {plot}.layout.yaxis.range[1])"
            assert browser.ask(zoomed) == 1 and browser.ask(f'{plot}.querySelectorAll(".modebar-btn").length') > 3


def test_what_a_model_is_called_cannot_write_html(tmp_path: Path) -> None:
    report = HtmlReport("<script>a</script>")
    report.add_text("1 < 2 & 3")
    report.save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script>" not in page and "1 &lt; 2 &amp; 3" in page
