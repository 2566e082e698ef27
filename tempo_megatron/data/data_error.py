from __future__ import annotations


class DataError(ValueError):
    """Something about the user's own data, vocabulary or disk: the text says what was found and what to do."""
