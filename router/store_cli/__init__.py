"""`python -m router store`: what a shared store has, for people. It only asks, and takes no lease on anything."""
