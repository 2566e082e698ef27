"""The notebooks run from the first cell to the last, and find what they are there to show."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("nbclient", reason="notebooks are run by nbclient; pip install tempo-megatron[test]")
import notebooks

pytestmark = [
    pytest.mark.slow,
    # Of jupyter_client, where it talks to a kernel of this machine.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:jupyter_client", "ignore::DeprecationWarning"),
]


def test_bert_keeps_less_and_learns() -> None:
    found = notebooks.list_texts(notebooks.execute("finetune_bert"))
    stock, tempo = (float(number) for number in re.findall(r": ([\d.]+) MiB kept", "".join(found)))
    assert tempo < 0.5 * stock
    rows = re.findall(r"loss ([\d.]+) at first, ([\d.]+) at last, (\d+)% right", found[-1])
    assert len(rows) == 2
    for first, last, right in rows:
        assert float(last) < 0.9 * float(first) and int(right) > 40  # a third by chance


def test_a_command_becomes_a_table_a_figure_and_a_plan() -> None:
    notebook = notebooks.execute("will_it_fit")
    table, plan = notebooks.list_texts(notebook)
    (stock, tempo) = re.findall(r"^peak +([\d.]+) +([\d.]+)", table, re.MULTILINE)[0]
    assert float(tempo) < 0.7 * float(stock) and "Tempo fits 40.00 GiB" in table
    drawn = [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})
    ]
    assert len(drawn) == 1
    assert float(re.search(r"([\d.]+) GiB  ", plan)[1]) <= 14 and "--use-tempo" in plan
