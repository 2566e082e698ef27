"""Estimates the memory of every rank of a cluster: model states, schedule and the caching allocator."""
