"""A stream that breaks off goes on from another worker: what is kept of it, what is asked there, and how the rest
becomes one with the first part.

`refusal` says which requests cannot be continued, `bodies` what workers are asked, `record` what was sent so far,
`rewriting` makes another worker's events the same stream's, and `relay` takes all that from and to chunks. These are
pure: bytes in, bytes out. `migrating` alone knows workers and their models. None knows connections or routing.
"""
