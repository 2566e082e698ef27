"""Makes the site's pages of what stands in the repository once: the README, the cards, names and docstrings.

- README.md is the start page; CONTRIBUTING.md, CHANGELOG.md and the cards are pages as they are.
- A link to a file that is a page of the site, or a picture, leads there. One to another file of the repository becomes
  the file's path, and one to nothing ends the build.
- A notebook of examples/notebooks is a page with what its cells printed and drew when it was run last.
- reference.md goes on with the public names, whose text mkdocstrings takes from their docstrings.
"""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# Path of the site -> file of the repository, of what lies outside of docs/.
PAGES = {"index.md": "README.md"} | {
    name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/gpu/README.md")
}
PICTURES = "benchmarks/results"
NOTEBOOKS = "examples/notebooks"
# Packages with the names that others use. A room's names are those of its __all__.
ROOMS = "gelu glu silu squared_relu norm dropout_add attention linear_cross_entropy recompute".split()
_LINK = re.compile(r"(?P<text>!?\[[^]]*\])\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def list_outside() -> dict[str, str]:
    """Path of the site -> file of the repository, for everything outside of docs/."""
    found = dict(PAGES)
    for pattern in ("cards/*.md", f"{PICTURES}/*/*.png"):
        found |= {name: name for path in sorted(ROOT.glob(pattern)) if (name := path.relative_to(ROOT).as_posix())}
    names = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / NOTEBOOKS).glob("*.ipynb"))]
    return found | {name.replace(".ipynb", ".md"): name for name in names}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that stand elsewhere."""
    for uri, name in list_outside().items():
        if not uri.startswith(NOTEBOOKS):
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
            continue
        files.append(File.generated(config, uri, content=write_notebook(ROOT / name)))
    return files


def write_notebook(path: Path) -> str:
    """A notebook as Markdown, with what its cells printed and drew."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", ()):
            if drawn := output.get("data", {}).get("image/png"):
                parts.append(f'<img alt="What the cell drew" src="data:image/png;base64,{"".join(drawn).strip()}">')
            elif "text" in output:
                parts.append(f"```text\n{''.join(output['text'])}```")
    return "\n\n".join(parts) + "\n"


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Puts every card below the page of cards."""
    evidence = next(item for item in nav.items if isinstance(item, Section) and item.title == "Evidence")
    for uri in sorted(uri for uri in list_outside() if uri.startswith("cards/") and not uri.endswith("/README.md")):
        file = files.get_file_from_path(uri)
        assert file is not None
        page = file.page or Page(None, file, config)
        page.parent = evidence
        evidence.children.append(page)
        nav.pages.append(page)
    # The arrows at the foot of a page follow the order of the menu.
    for before, after in zip([None, *nav.pages], [*nav.pages, None], strict=True):
        if before is not None:
            before.next_page = after
        if after is not None:
            after.previous_page = before
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets each link lead to a page of the site, or name a file of the repository."""
    uri = page.file.src_uri
    outside = list_outside()
    if uri == "reference.md":
        return markdown + write_reference()
    source = outside.get(uri, f"docs/{uri}")
    uri_of = {name: place for place, name in outside.items()}

    def lead(match: re.Match[str]) -> str:
        target = match["target"]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        name = os.path.normpath(PurePosixPath(source).parent / target)
        if not (ROOT / name).exists():
            raise PluginError(f"{source} links to {target}, which does not exist")
        place = uri_of.get(name, name.removeprefix("docs/") if name.startswith("docs/") else None)
        if place is None:
            text = match["text"].strip("![]")
            return f"`{name}`" if text.strip("`") in (name, target) else f"{text} (`{name}`)"
        text = match["text"]
        if text.strip("[]") in (name, target):  # the name of the file; a reader of the site knows the page's title
            text = f"[{(ROOT / name).read_text(encoding='utf-8').partition('# ')[2].partition(chr(10))[0]}]"
        return f"{text}({os.path.relpath(place, PurePosixPath(uri).parent)}{match['anchor'] or ''})"

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(lead, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(lead, markdown[end:])])


def write_reference() -> str:
    """Lists the public names, each with the place of its docstring."""
    lines: list[str] = []
    homes = read_constant("tempo_megatron/__init__.py", "_HOMES")
    # A class that is made when somebody asks for it has no text; the function that makes it has.
    chapters = {
        "tempo_megatron": [
            f"tempo_megatron.{home}.{name}" for name, home in sorted(homes.items()) if is_defined(home, name)
        ]
    }
    chapters["tempo_torch"] = [
        f"tempo_torch.{name}" for name in read_constant("kernels/tempo_torch/__init__.py", "__all__")
    ]
    for room in ROOMS:
        file = f"kernels/tempo_kernels/{room}.py"
        names = read_constant(file if (ROOT / file).exists() else file.replace(".py", "/__init__.py"), "__all__")
        chapters[f"tempo_kernels.{room}"] = [f"tempo_kernels.{room}.{name}" for name in names]
    for package, names in chapters.items():
        lines += ["", f"## {package}"]
        for name in names:
            lines += ["", f"::: {name}"]
    return "\n".join(lines) + "\n"


def is_defined(home: str, name: str) -> bool:
    path = ROOT / "tempo_megatron" / f"{home.replace('.', '/')}.py"
    return any(getattr(node, "name", None) == name for node in ast.parse(path.read_text(encoding="utf-8")).body)


def read_constant(path: str, name: str) -> dict[str, str] | list[str]:
    """Reads a constant of a file without importing it."""
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            value: dict[str, str] | list[str] = ast.literal_eval(node.value)
            return value
    raise PluginError(f"{path} has no {name}")
