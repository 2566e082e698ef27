"""Breaks long unbroken runs of text, for training and encoding byte-level BPE.

GPT-2's tokenizer first divides a text into pretokens: letters, digits, other signs, white space. Learning pairs takes
time that grows with the square of a pretoken's length (0.25 MB of spaces: 90 s), so a run of more than LONGEST_RUN
characters of one kind is cut. A text without such a run is left whole and has the tokens that it always had.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

LONGEST_RUN = 1024

# The kinds are GPT-2's, each a little wider where `re` has no class for it (its \w knows letters and numbers together,
# its \s also has the controls U+001C to U+001F): what GPT-2 keeps together is at most two of these runs.
_RUNS = re.compile(
    r"[^\W\d_]+"  # letters, and numbers such as a fraction
    r"|[^\W_a-zA-Z]+"  # numbers, and letters beyond ASCII
    r"|(?:[^\w\s]|[_\x1c-\x1f])+"  # other signs
    r"|[^\S\x1c-\x1f]+"  # white space
)
_UNBROKEN = re.compile(r"[\S\x1c-\x1f]+|\s+")


def cut_long_runs(text: str) -> Iterator[str]:
    """The parts of `text`, in order: cut LONGEST_RUN characters after a run's beginning, and again, while it goes on.

    A run never reaches over the border between other signs and white space, so a text that is cut at such borders
    first has the same parts.
    """
    start = 0
    for run in _RUNS.finditer(text) if _may_have_long_run(text) else ():
        for cut in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
            yield text[start:cut]
            start = cut
    yield text[start:]


def _may_have_long_run(text: str) -> bool:
    """Quick, and never wrongly False: a long run covers one of the windows of half its length from end to end."""
    step = LONGEST_RUN // 2
    return len(text) > LONGEST_RUN and any(_UNBROKEN.fullmatch(text, at, at + step) for at in range(0, len(text), step))
