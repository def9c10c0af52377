"""One question per script: `python -m experiments.NAME` from the project's root."""
