"""What the project claims of time and memory: one question per module, asked by `python -m benchmarks`."""
