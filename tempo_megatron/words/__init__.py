"""Parses the words of a command line and JSON, and writes sizes."""
