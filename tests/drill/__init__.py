"""Drills: real processes under load, one fault after the other, and what callers saw of it. `make drill` prints a table."""
