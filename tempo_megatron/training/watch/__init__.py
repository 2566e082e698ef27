"""Ranks that notice one another's end: heartbeat, stop signal, agreement."""
