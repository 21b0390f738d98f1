"""KV events on the router's side: taken from the event plane into the index, and watched for what goes missing.

Knows no requests but by their outcomes; what events mean and in which order they count is the indexer's.
"""
