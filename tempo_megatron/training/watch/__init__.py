"""Ranks that notice one another's end: team, stop signal."""
