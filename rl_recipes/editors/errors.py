"""The error of editors, in a file of its own so that every module of the package can raise it."""

from tpips_reward.errors import TPIPSError


class EditorError(TPIPSError):
    """An editor cannot be loaded, or was given something that it cannot take."""
