"""The workers: what each is, whether it serves, who could take a request, and how they join, drain and leave.

Asks workers what they are and whether they are well; must not know requests.
"""
