"""Modules for the slots of Megatron's transformer layer, a file for each slot, and `layer_spec`, which fills them."""

from tempo_megatron.slots.megatron_versions import check_megatron

check_megatron()
