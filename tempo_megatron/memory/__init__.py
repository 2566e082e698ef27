"""What a training step keeps for backward, measured on the real modules."""

from tempo_megatron.memory.ledger import Ledger, Row, measure

__all__ = ["Ledger", "Row", "measure"]
