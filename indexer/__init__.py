"""The prefix index: which (worker, dp_rank, tier) holds which prefix.

Owns the types, the events of the event plane, hashing, the index itself, the cursors that keep events in order, and
snapshots. Pure: no I/O, no clock, no logging. It must not know any engine, nor who calls it.
"""
