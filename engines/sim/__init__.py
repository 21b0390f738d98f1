"""A simulated fleet of engines, for trying policies without GPUs; nothing in the core imports it.

Pure, driven by whatever clock its caller has: `cache` (blocks), `request`, `scheduler` (batching), `timing` (how long a
step takes), and what goes over the wire: `generation`, `tokens`, `flavour`, `vllm_flavour`, `sglang_flavour`. A shell
around them: `clock`, `rank`, `event_publisher`, `worker`, `answering`, `server`, `fleet`. `python -m engines.sim
--help` lists the flags.
"""
