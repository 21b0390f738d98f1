"""The shell that serves: HTTP, ingest, discovery, clocks and logs around the pure `router.scheduling`.

Composition happens in `router.app` alone; of `publishers`, everything else uses only the event plane and the logs.
"""
