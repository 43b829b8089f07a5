"""The one error type a person may see: what went wrong, and what to do about it."""


class HsprobeError(Exception):
    """Trouble that ends a command with exit code 2.

    Args:
        what: what went wrong, a sentence.
        fix: what to do about it, a sentence.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what} {fix}")
        self.what = what
        self.fix = fix
