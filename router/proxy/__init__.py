"""One request on its way to a worker and back: sent, tried elsewhere where a worker fails, relayed, watched, ended.

Drives `router.http`, `router.split` and `router.migration`. Must not choose workers: `routing` does.
"""
