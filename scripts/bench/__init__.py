"""Measures the router side by side with its peers on one machine; `scripts/bench/run --help` says how."""
