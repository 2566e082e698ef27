"""How far a long search is, for people at a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

NoteProgress = Callable[[int, int], None]
"""Called with how much is done, and all."""


@contextlib.contextmanager
def show_progress(what: str) -> Iterator[NoteProgress | None]:
    """A progress bar, where stderr is a terminal; yields what is called with the number done and all."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=what, unit="op", leave=False) as bar:

        def note(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield note


def scale_progress(note: NoteProgress | None, done: int, size: int, total: int) -> Callable[[float], None] | None:
    """Notes a share, from 0 to 1, of the next `size` of `total`, of which `done` are done."""
    return (lambda share: note(done + int(min(share, 1.0) * size), total)) if note else None
