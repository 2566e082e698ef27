"""Measures what the real modules keep for backward: the recorder listens, the ledger counts, the timeline follows."""
