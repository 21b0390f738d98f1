"""The shell that serves: HTTP, ingest, discovery, clocks and logs around the pure `router.scheduling`.

Composition happens in `router.app` alone. docs/architecture.md lists the packages, and what is used of `publishers`.
"""
