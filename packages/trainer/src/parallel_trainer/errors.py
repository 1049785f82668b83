"""The error that carries a message for the user and nothing else."""

from __future__ import annotations


class UserError(Exception):
    """Something a user can mend. Commands print the message, without a traceback, and exit with 2."""
