"""The Mooncake Store that workers share: what it has of a prompt, and keeping its hottest prefixes.

Must not know HTTP's client side; `routing` reads what it finds.
"""
