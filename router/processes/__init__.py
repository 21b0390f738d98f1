"""Several router processes on one port: the parent that starts them, and what they share through mapped memory.

Must not know requests.
"""
