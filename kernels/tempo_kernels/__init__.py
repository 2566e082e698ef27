"""Operations of a transformer layer that keep little for backward. Needs torch only; knows nothing of Megatron."""

__version__ = "0.1.0"
