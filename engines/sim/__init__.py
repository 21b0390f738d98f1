"""A simulated engine: paged prefix cache, continuous batching and a timing model (pure), and a server that speaks like
vLLM or SGLang (a shell). For trying policies without GPUs; nothing in the core imports it."""
