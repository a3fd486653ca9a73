"""Faults to plant in place of a function."""


def raising(error: BaseException):
    """Return a function of any arguments that raises `error`."""

    def fail(*_args, **_kwargs):
        raise error

    return fail
