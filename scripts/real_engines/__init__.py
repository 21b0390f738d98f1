"""Real vLLM and SGLang on a machine without an accelerator, for tests. Uses only the standard library."""
