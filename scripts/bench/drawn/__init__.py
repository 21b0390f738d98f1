"""Policies in virtual time on workloads and fleets that are drawn at random: what nobody can have tuned one on.

`scripts/bench/drawn/run --help`.
"""
