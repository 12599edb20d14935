"""Fuzzing of every decoder of untrusted input.

`targets` names the decoders: each takes bytes and returns, or raises an error that its caller handles. `corpus/` holds inputs to
begin with, and what was once found, a folder for each target. `python -m tests.fuzz` runs atheris, which is guided by coverage;
`test_fuzz` replays the corpus and mutations of it with every run of the tests.
"""
