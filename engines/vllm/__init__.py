"""vLLM as seen from outside: its KV events, what its answers say of it, its load."""
