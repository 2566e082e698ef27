"""Imported by the server from which the pool's processes are forked: Megatron on a CPU that answers as a GPU does."""

import megatron_cpu

megatron_cpu.install()

import grid.judge  # noqa: E402, F401  Megatron, and all that is slow to import, comes behind the installation.
