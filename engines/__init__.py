"""What vLLM and SGLang look like from outside.

Owns the codecs of their KV events, what their answers say of them (kind, model, block size, event sources, load) and
how they want a request shaped. Opens no socket and reads no clock. `engines.sim`, the simulated engine, has a server of
its own and is exempt.
"""
