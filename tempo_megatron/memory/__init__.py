"""What a training step keeps for backward, measured on the real modules: ledger.py counts, recorder.py listens."""
