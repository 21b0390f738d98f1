"""A simulated fleet of engines, for trying policies without GPUs; nothing in the core imports it.

Pure, driven by whatever clock its caller has: `cache` (blocks), `request`, `answers` (which token follows), `scheduler`
(batching), `decoding` (its requests that have nothing to do in most steps), `rank` (its steps one after the other),
`timing` (how long a step takes), `settings`, `faults`, and what goes over the wire: `generation`, `tokens`, `flavour`,
`vllm_flavour`, `sglang_flavour`. For prefill and decode apart: `transfers` (who gets whose KV), `place` (a worker as
its peers know it) and `connectors` (what each wants on the wire). `store`, which all workers share, is for
`python -m router simulate` alone. A shell around them: `clock`, `ports`, `event_publisher`, `worker`, `answering`,
`server`, `fleet`, `process`. `python -m engines.sim --help` lists the flags.
"""
