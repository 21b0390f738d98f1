"""What the router counts, and how Prometheus sees it: the registry, counts by request, gauges, and the lives of blocks.

Every name is explained in docs/metrics.md, which a test checks. Must not decide anything.
"""
