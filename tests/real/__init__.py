"""Drives the router as a user would, in front of real engines. Run by .ci/run; see docs/real-engines.md."""
