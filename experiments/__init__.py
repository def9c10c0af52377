"""Experiments, one script per question. Run `python -m experiments.NAME` from the root of the repository."""
