"""The one way an A/B run refuses to go on."""


class RunError(Exception):
    """A sentence for the person who started the run: what is wrong and what to do. Ends the command with status 2."""
