"""Reads and writes the files of a checkpoint; knows nothing of a run."""
