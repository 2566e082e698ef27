# ruff: noqa: RUF001 (quotes and full stops of other scripts are what this is about)
"""Splits text into sentences by a rule of its own, which needs no download.

A sentence ends
- after `.`, `!`, `?` or an ellipsis, with the quotes and brackets that close there, where white space follows and then
  anything but a small letter;
- after the full stops and other final marks of Chinese and Japanese, with what closes there;
- at a blank line.
A single `.` does not end a sentence after a single capital letter (an initial), after a word of ABBREVIATIONS, or
between a word of BEFORE_NUMBERS and a digit. White space around a sentence is dropped.
"""

from __future__ import annotations

import re

RULE, LINES = "rule", "lines"
WAYS = (RULE, LINES)
LONGEST_SENTENCE = 512
"""In tokens. Longer sentences are cut, because Megatron's sample index skips a document with a longer sequence."""

ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof rev gen col capt lt sgt sr jr st mt eds vs cf e.g i.e al approx dept est inc ltd co corp jan "
    "feb mar apr jun jul aug sep sept oct nov dec u.s u.k".split()
)
BEFORE_NUMBERS = frozenset("no nos vol fig figs eq eqs sec ch pp p ed art par".split())
_CLOSING = "\"'”’»)\\]"
_OPENING = "\"'“‘«(["
_CANDIDATE = re.compile(
    rf"(?<![.!?…])(?P<marks>[.!?…]+)[{_CLOSING}]*\s+(?=\S)"
    r"|[。！？｡]+[”’」』）]*"
    r"|\n[^\S\n]*(?:\n\s*)"
)
_LAST_WORD = re.compile(r"[^\s(\[\"'“‘«]*\Z")
_LOOKBEHIND = 40  # characters; no abbreviation is longer


def split_sentences(text: str, way: str) -> list[str]:
    """Returns the sentences of `text`, in order, none of them blank, by RULE, as above, or as its LINES."""
    if way == LINES:
        return [sentence for line in text.split("\n") if (sentence := line.strip())]
    sentences, start = [], 0
    for candidate in _CANDIDATE.finditer(text):
        if candidate["marks"] is None or _is_end(text, candidate):
            sentences.append(text[start : candidate.end()].strip())
            start = candidate.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _is_end(text: str, candidate: re.Match[str]) -> bool:
    if "\n\n" in candidate[0].replace(" ", "").replace("\r", ""):
        return True
    after = text[candidate.end() : candidate.end() + 4].lstrip(_OPENING)
    if after[:1].islower():
        return False
    if candidate["marks"] != ".":
        return True
    at = candidate.start("marks")
    found = _LAST_WORD.search(text[max(0, at - _LOOKBEHIND) : at])
    assert found is not None
    word = found[0]
    is_initial = len(word) == 1 and word.isalpha() and word.isupper()
    counts = after[:1].isdigit() and word.lower() in BEFORE_NUMBERS
    return not (is_initial or counts or word.lower() in ABBREVIATIONS)
