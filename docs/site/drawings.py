"""Writes the drawings of docs/concepts.md as SVG: `python docs/site/drawings.py`. The step's curves are measured
(benchmarks/results/estimate/step_memory.jsonl), the other drawings are schemes."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "images"
STEP = ROOT / "benchmarks" / "results" / "estimate" / "step_memory.jsonl"
BLUE, ORANGE, GREY, INK, LIGHT = "#0072B2", "#D55E00", "#999999", "#333333", "#DDDDDD"
# What a tensor of a GPT layer is, and its sbh in bf16: kept by stock with fused attention, and by Tempo in place.
TENSORS = (
    ("input of norm 1", 2.0, 0.0),
    ("output of norm 1", 2.0, 2.0),
    ("q, k, v", 6.0, 6.0),
    ("output of attention", 2.0, 2.0),
    ("dropout mask 1", 1.0, 0.0),
    ("input of norm 2", 2.0, 0.0),
    ("output of norm 2", 2.0, 2.0),
    ("input of GELU", 8.0, 0.5),
    ("output of GELU", 8.0, 8.0),
    ("dropout mask 2", 1.0, 0.0),
)


class Drawing:
    """Shapes of one SVG, in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title = (width, height), title
        self.shapes: list[str] = []

    def text(self, x: float, y: float, words: str, *, colour: str = INK, anchor: str = "start", size: int = 14) -> None:
        style = f'fill="{colour}" text-anchor="{anchor}" font-size="{size}"'
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, edge: str = "none") -> None:
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{edge}"/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, colour: str = INK, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="1.6"{dash} '
            f'marker-end="url(#{colour[1:]})"/>'
        )

    def path(self, points: list[tuple[float, float]], colour: str) -> None:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.shapes.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')

    def write(self, path: Path) -> None:
        width, height = self.size
        heads = "".join(
            f'<marker id="{colour[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
            for colour in (INK, BLUE, ORANGE, GREY)
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="Helvetica, Arial, sans-serif">',
            f"<title>{escape(self.title)}</title>",
            f"<defs>{heads}</defs>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *self.shapes,
            "</svg>",
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw_layer() -> Drawing:
    """A bar for each tensor of a layer, stock beside Tempo."""
    totals = [sum(row[place] for row in TENSORS) for place in (1, 2)]
    drawing = Drawing(760, 70 + 34 * len(TENSORS), "What a layer keeps for backward")
    drawing.text(16, 26, "bytes per token and hidden unit (bf16, dropout 0.1, fused attention)", size=13)
    drawing.text(560, 26, f"stock {totals[0]:g}", colour=GREY)
    drawing.text(640, 26, f"Tempo {totals[1]:g}", colour=ORANGE)
    for number, (name, stock, tempo) in enumerate(TENSORS):
        y = 46 + 34 * number
        drawing.text(166, y + 18, name, anchor="end")
        for size, colour, top in ((stock, GREY, y), (tempo, ORANGE, y + 14)):
            if not size:
                continue
            drawing.box(180, top, 48 * size, 12, colour)
            drawing.text(
                186 + 48 * size,
                top + 11,
                "0.5, a bit of each element" if size == 0.5 else f"{size:g}",
                colour=colour,
                size=11,
            )
    return drawing


def draw_in_place() -> Drawing:
    """The same operation and linear three times: what is alive between forward and backward."""
    drawing = Drawing(760, 350, "What in place and recompute mean")
    rows = (
        ("stock", "keeps both", (GREY, GREY), "GELU' from x"),
        ("in place", "keeps the output, and one bit", ("white", ORANGE), "GELU' from y"),
        ("recompute", "keeps the input", (BLUE, "white"), "y from x again, then GELU' from x"),
    )
    for number, (name, what, (x_fill, y_fill), backward) in enumerate(rows):
        top = 20 + 104 * number
        drawing.text(16, top + 24, name, size=16)
        drawing.text(16, top + 46, what, size=12)
        for left, label, fill in ((240, "x", x_fill), (430, "y = GELU(x)", y_fill)):
            drawing.box(left, top, 110, 44, fill, edge=INK)
            drawing.text(left + 55, top + 27, label, anchor="middle", colour=INK if fill == "white" else "white")
        drawing.arrow(350, top + 22, 430, top + 22)
        drawing.text(390, top + 14, "GELU", anchor="middle", size=12)
        drawing.arrow(540, top + 22, 620, top + 22)
        drawing.text(580, top + 14, "linear", anchor="middle", size=12)
        drawing.text(628, top + 27, "fc2(y)")
        drawing.arrow(540, top + 62, 350, top + 62, dashed=True)
        drawing.text(445, top + 80, backward, anchor="middle", size=12)
    drawing.text(
        16, 338, "filled: alive from forward to backward; white: freed. fc2 keeps its input y anyway.", size=12
    )
    return drawing


def draw_masks() -> Drawing:
    """One matrix of mask elements, which two layouts divide differently and draw alike."""
    drawing = Drawing(760, 300, "How a mask knows its place")
    drawing.text(16, 28, "mask = Philox(seed, sample, stack, layer, site, head, row, column)", size=15)
    # Any fixed pattern will do; this one has the ratio of dropout 0.25.
    dropped = {
        (row, column) for row in range(6) for column in range(8) if (row * 5 + column * 3 + row * column) % 4 == 0
    }
    for left, title, cuts in (
        (40, "one GPU", ()),
        (290, "TP 2: columns", ((4, None),)),
        (540, "SP 2 or CP 2: rows", ((None, 3),)),
    ):
        drawing.text(left, 66, title)
        for row in range(6):
            for column in range(8):
                shift_x = sum(14 for cut, _ in cuts if cut is not None and column >= cut)
                shift_y = sum(14 for _, cut in cuts if cut is not None and row >= cut)
                fill = "white" if (row, column) in dropped else BLUE
                drawing.box(left + 22 * column + shift_x, 80 + 22 * row + shift_y, 20, 20, fill, edge=BLUE)
    drawing.text(16, 262, "White is dropped. A rank computes only its own elements, from where they stand in the whole")
    drawing.text(16, 282, "tensor: so nothing is stored or sent, and no layout changes a mask.")
    return drawing


def draw_step() -> Drawing:
    """Bytes alive over one step of a GPT-2 345M, as followed on tensors without memory."""
    records = [json.loads(line) for line in STEP.read_text(encoding="utf-8").splitlines()]
    drawing = Drawing(760, 340, "A step over time")
    left, top, width, height = 60, 40, 680, 240
    highest = max(record["peak_bytes"] for record in records)
    for gib in range(0, int(highest / 2**30) + 1, 5):
        y = top + height - height * gib * 2**30 / highest
        drawing.box(left, y, width, 1, LIGHT)
        drawing.text(left - 8, y + 5, f"{gib}", anchor="end", size=12)
    drawing.text(16, 24, "GiB alive", size=12)
    for number, (record, colour) in enumerate(zip(records, (GREY, BLUE, ORANGE), strict=True)):
        alive = record["alive_bytes"]
        drawing.path(
            [
                (left + width * place / (len(alive) - 1), top + height - height * num_bytes / highest)
                for place, num_bytes in enumerate(alive)
            ],
            colour,
        )
        drawing.text(left + 12 + 225 * number, top + height + 48, f"{record['run']}", colour=colour, size=13)
    drawing.text(left, top + height + 20, "forward: what is kept piles up", size=12)
    drawing.text(left + width, top + height + 20, "backward: it is used and freed", anchor="end", size=12)
    return drawing


DRAWINGS = {"layer_keeps": draw_layer, "in_place": draw_in_place, "masks": draw_masks, "step": draw_step}


def main() -> None:
    for name, draw in DRAWINGS.items():
        draw().write(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
