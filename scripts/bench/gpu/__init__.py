"""Several real engines on one GPU, and the routing modes side by side in front of them."""
