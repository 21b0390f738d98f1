"""The error of A/B runs and simulations."""


class RunError(Exception):
    """Tells the user what is wrong and what to do. Ends the command with status 2."""
