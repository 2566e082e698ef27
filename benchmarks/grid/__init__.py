"""The parts of benchmarks/compatibility.py, and small models in every layout for tests."""
