"""TempoConfig, the table of its switches, the values of single layers, and their command-line arguments."""
