"""Who may come in, as whom, and how often; and what the router shows to those that it goes to.

Owns API keys, their limits, TLS for the front, and which headers pass. Knows nothing of routing: a request either
becomes a tenant's or is refused before it is routed.
"""
