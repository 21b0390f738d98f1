"""A/B runs: replays one trace, open loop, against a fleet once per routing mode and sets the results side by side.

Owns the trace format, the load generator, the child processes of a run and its report. Must not know how the router
decides: it talks to it, and to the engines, as any client does, over HTTP and the command line.
"""
