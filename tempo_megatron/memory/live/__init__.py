"""Watches the memory of a running job: its ledger, the plan at its start, the report when memory runs out."""
