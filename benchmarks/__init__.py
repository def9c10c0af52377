"""One question per script: `python -m benchmarks.NAME` from the project's root."""
