"""Errors that end a command with one line on the screen, and the exit code each one maps to."""


class ComposerError(Exception):
  """An expected failure: the command line prints the message without a traceback.

  Attributes:
    exit_code: process exit status (0 is success, 1 is left to unexpected errors).
  """

  exit_code = 1


class UserError(ComposerError):
  """The request cannot be carried out as written: a bad key, value, file or folder."""

  exit_code = 2


class InfrastructureError(ComposerError):
  """The machine is at fault: no sandbox support, a full disk, a dead worker."""

  exit_code = 3


class NumericsError(ComposerError):
  """Training left the finite numbers and stopped before it could do harm."""

  exit_code = 4
