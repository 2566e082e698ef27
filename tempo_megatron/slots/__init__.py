"""What Megatron asks for: a file for each slot of its transformer layer, and `layer_spec`, which fills the slots."""

from tempo_megatron.slots.megatron_versions import check_megatron

check_megatron()
