"""Benchmarks that a user can repeat: one question per module, all measured in the same way, peers in the same run.

`attnconv bench` asks them and writes what it finds; nothing here is imported by the library itself.
"""
