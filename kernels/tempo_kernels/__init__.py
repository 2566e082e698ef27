"""Operations of a transformer layer that keep little for backward. They need torch and know nothing of Megatron."""

__version__ = "0.1.0"

KEEPS = {"inplace": "output", "recompute": "input"}
"""Value of a switch, in Megatron and in `tempoize` -> `keep` of an operation: the tensor that it keeps for backward."""
