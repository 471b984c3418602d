"""Errors that oomwatch raises on purpose.

OomwatchError
├── UsageError           wrong use: one line, exit status 2
│   └── NoStartError         what was asked about does not start: exit status 1
├── NoInputError         no input at all could be read: exit status 3
└── SourceError          one source failed; the others go on
    ├── NoDataError          nothing to read here, which is normal
    ├── SourceUnavailable    cannot be read now; trying again later may help
    └── PermissionDeniedError  the operator must allow it once
"""

from __future__ import annotations


class OomwatchError(Exception):
    """Base of all errors that carry one line for the user."""


class UsageError(OomwatchError):
    """The command line, configuration or a given value is wrong."""


class NoStartError(UsageError):
    """A planned server does not start, or its goal is out of reach."""


class NoInputError(OomwatchError):
    """Not one of the inputs could be read."""


class SourceError(OomwatchError):
    """A source could not be read; the message says what and what to do."""


class NoDataError(SourceError):
    """The source is there and has nothing to say."""


class SourceUnavailable(SourceError):  # noqa: N818 - a state, not a mistake
    """The source cannot be read now."""


class PermissionDeniedError(SourceError):
    """The source exists but may not be read by this user."""
