"""Faults on purpose, drawn from a seed, under load, and what must hold all the same: `python -m tests.chaos --help`.

`actors` are the processes and `fleet` wires them; `faults` are what goes wrong, `schedule` draws them; `load` asks and
`answers` judges what came back; `settling` looks at what is left afterwards. `virtual` is the same idea without
processes, in simulated time.
"""
