"""How much the router carries on this machine, and its peers beside it: `scripts/load --help`."""
