"""Fuzzing of everything that reads what others sent: `python -m tests.fuzz --help`.

A *target* gets bytes and raises where a property is broken; `targets` has one file for each surface. `engine` makes the
bytes: it changes seeds and what it found of interest before, all by one seed.
"""
