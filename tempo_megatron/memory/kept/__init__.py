"""Measures what the real modules keep for backward: recorded, counted as a ledger, followed over a step."""
