"""Beside an engine: its KV events and load in, the event plane out.

Owns the event plane itself (in-process or NATS), the ZMQ source, the relay that stamps and keeps batches for replay,
the load poller, and how both shells log. It must not know the router.
"""
