"""Runs a step of the real modules on tensors without memory."""
