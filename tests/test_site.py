"""The documentation site: it builds strictly, its pages open without an error, its pictures show, its search finds."""

from __future__ import annotations

import functools
import http.server
import os
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, find_chromium

pytest.importorskip("mkdocs", reason='the site needs pip install "tempo-megatron[docs]"')

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "docs" / "site" / "mkdocs.yml"
PICTURES = 'Array.from(document.querySelectorAll("article img, article object")).filter(i => !i.naturalWidth).length'


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(CONFIG, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def list_pages(site: Path) -> list[str]:
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("index.html"))


def test_every_document_and_public_name_has_its_place(site: Path) -> None:
    pages = list_pages(site)
    for folder in ("docs", "cards"):
        for path in (ROOT / folder).glob("*.md"):
            name = "" if path.name == "README.md" else f"{path.stem}/"
            assert f"{'cards/' if folder == 'cards' else ''}{name}index.html" in pages
    reference = (site / "reference" / "index.html").read_text(encoding="utf-8")
    for name in ("tempo_block_spec", "TempoConfig", "tempo_torch.tempoize", "linear_cross_entropy", "bias_dropout_add"):
        assert name in reference


def test_drawings_are_what_their_script_writes(tmp_path: Path) -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "site" / "drawings.py"))["DRAWINGS"]
    for name, draw in drawn.items():
        draw().write(tmp_path / name)
        assert (tmp_path / name).read_text() == (ROOT / "docs" / "images" / f"{name}.svg").read_text(), name


PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/gpu/README.md", "cards/README.md")
MENU = f"nav: [index.md, {', '.join(PAGES[1:4])}, Evidence: [cards/README.md]]\n"


@pytest.mark.parametrize(
    ("file", "text", "messages"),
    [
        ("README.md", "[a page](docs/missing.md)\n", ["README.md links to docs/missing.md, which does not exist"]),
        ("docs/lost.md", "# Lost\n", ["- lost.md", "Aborted with 1 warnings in strict mode"]),
    ],
    ids=["a link to nothing", "a page that no menu has"],
)
def test_what_a_reader_cannot_reach_ends_the_build(file: str, text: str, messages: list[str], tmp_path: Path) -> None:
    """Of a small site in which all else is as it should be."""
    config = tmp_path / "docs" / "site" / "mkdocs.yml"
    config.parent.mkdir(parents=True)
    shutil.copy2(CONFIG.parent / "hooks.py", config.parent)
    config.write_text(CONFIG.read_text(encoding="utf-8").partition("\nnav:")[0] + f"\n{MENU}", encoding="utf-8")
    for page, content in {**dict.fromkeys(PAGES, "# A page\n"), file: text}.items():
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text(content)
    done = build(config, tmp_path / "site")
    said = done.stdout + done.stderr
    assert done.returncode and all(message in said for message in messages), said


def test_pages_open_without_an_error_pictures_show_and_search_finds(site: Path, address: str, tmp_path: Path) -> None:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no Chromium is found, in which the site's pages would be opened: apt-get install chromium")
    with Browser(chromium, tmp_path) as browser:
        for page in list_pages(site):
            browser.open(f"{address}/{page.removesuffix('index.html')}")
            assert (browser.problems, browser.wait_for("document.title")) and not browser.problems, page
            assert browser.ask(PICTURES) == 0, page
        browser.open(f"{address}/?q=use-tempo")
        found = browser.wait_for('document.querySelectorAll(".md-search-result__item").length')
        assert found >= 3 and not browser.problems
        browser.open(f"{address}/no_such_page.png")
        assert browser.problems, "a page that is not there is no problem to this test"
