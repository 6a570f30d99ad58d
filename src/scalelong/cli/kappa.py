"""stub"""

EXAMPLES = ""


def kappa() -> None:
    """x"""
