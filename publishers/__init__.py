"""Beside an engine: its KV events and load in, the event plane out.

Owns the event plane itself (in-process or NATS), the ZMQ source, the relay that stamps and keeps batches for replay, and
the load poller. It must not know the router.
"""
