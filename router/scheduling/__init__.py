"""Load accounting, costs, policies and the choice of a worker. Pure: `now` and `random.Random` are arguments.

Knows only the indexer; must not know HTTP, engines or the event plane.
"""
