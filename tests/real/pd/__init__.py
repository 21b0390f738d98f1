"""Prefill/decode pairs of real vLLM behind the router, and a plain vLLM with the same weights to compare them with."""
