"""All the long tests one after the other, and what they found in one table: `scripts/nightly --help`."""
