"""Benchmarks of time and memory, one per module; run them with `python -m benchmarks`."""
