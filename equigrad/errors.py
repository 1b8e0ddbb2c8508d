"""Errors that are the user's to mend. The command line prints their text alone and exits with code 2."""


class UserError(Exception):
    """Something the user gave is wrong. The message says what, where (file, line, key, rank) and what would be right.

    Raise it for bad input only: a fault of the program itself keeps its traceback.
    """
