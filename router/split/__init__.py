"""Requests in two parts, where one worker prefills and another decodes: who can work with whom, the two bodies, and the
course of both legs.

Must not know HTTP's client side; `exchange` drives it.
"""
