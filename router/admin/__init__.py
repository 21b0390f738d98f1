"""The admin surface: the fleet and the log level, changed over HTTP while the router runs.

It knows how each path is answered and what is told; what a change means is the roster's affair.
"""
