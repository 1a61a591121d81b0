"""The errors of this package: each message is a sentence that names the thing, the value and the remedy."""

from __future__ import annotations


class TPIPSError(ValueError):
    """Base of every error that bad input raises here; a ValueError, so that generic handlers keep working."""
