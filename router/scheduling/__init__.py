"""Pure: load accounting, costs, policies, the choice itself. `now` and `random.Random` are arguments.

Knows only the indexer; must not know HTTP, engines or the event plane.
"""
