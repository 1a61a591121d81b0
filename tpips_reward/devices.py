"""Where models run: a device by name, and one sentence for a device that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tpips_reward.errors import TPIPSError


def parse_device(device: torch.device | str | None) -> torch.device:
    """A device that is there; None: the GPU if there is one, else the CPU.

    Raises:
        TPIPSError: an unknown name, or a GPU that this machine does not have.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = named_device(device)
    if target.type == "meta":
        raise TPIPSError("The device 'meta' holds no numbers, so nothing can be scored on it; use 'cpu'.")
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise TPIPSError(
            f"The device {str(target)!r} is not there (GPUs found: {torch.cuda.device_count()}); use 'cpu'."
        )
    return target


def named_device(device: torch.device | str) -> torch.device:
    """A device by its name, there or not.

    Raises:
        TPIPSError: an unknown name.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise TPIPSError(f"The device {device!r} is unknown; use cpu, cuda, cuda:1 ...") from None


def usable_device(device: torch.device | str | None) -> torch.device:
    """`parse_device`, for what has no weights yet to be moved: the device is tried with one number.

    Raises:
        TPIPSError: as there, or a device that this PyTorch cannot use.
    """
    target = parse_device(device)
    with errors_named(target, "a model"):
        torch.zeros(1, device=target)
    return target


@contextmanager
def errors_named(device: torch.device | str | None, what: str, size: str = "") -> Iterator[None]:
    """What PyTorch says when something cannot go to a device, as one sentence.

    Args:
        device: where it goes.
        what: goes there, such as "the metric".
        size: of it, such as "1.2 GiB", for a device whose memory is full.

    Raises:
        TPIPSError: the device is full, or this PyTorch or machine cannot use it.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        room = f" ({size})" if size else ""
        raise TPIPSError(
            f"The device {str(device)!r} has not enough free memory for {what}{room}; free some, choose bfloat16 or another "
            "device."
        ) from error
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:150] or type(error).__name__
        raise TPIPSError(f"The device {str(device)!r} cannot be used for {what} ({reason}); use 'cpu'.") from error
