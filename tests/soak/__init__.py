"""The router under load for long, while workers come and go and prompts change: `scripts/soak --help`.

Whether it leaks or slows down is judged by `verdict` (pure) from what is sampled every few seconds.
"""
