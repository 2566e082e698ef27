"""Operations of a transformer layer that keep little for backward. They need torch and know nothing of Megatron."""

__version__ = "0.1.0"
