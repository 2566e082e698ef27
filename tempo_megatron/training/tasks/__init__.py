"""Datasets and losses of each family of models."""
