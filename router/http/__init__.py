"""HTTP/1.1 on bare protocols: requests in (`front`), workers out (`upstream`), chunks framed, not decoded (`chunked`).

Knows bytes and heads; must not know OpenAI, routing or the fleet.
"""
