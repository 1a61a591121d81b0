"""What a metric answers: a finite number for each thing that it was asked, or an error that names the thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tpips_reward.errors import NotFinite, TPIPSError


def name_comparison(aspect: str | None, *images: str) -> str:
    """What messages call images that are compared in an aspect."""
    return f"{' and '.join(images)} in {'overall similarity' if aspect is None else repr(aspect)}"


def check_finite(values: Tensor, label: Callable[[int], str]) -> Tensor:
    """The same tensor, (N,) or (N, ...), graph and all: what cannot be a score must not pass for one.

    Args:
        label: what a row is of, for the error.

    Raises:
        NotFinite: NaN or infinite numbers.
    """
    finite = values.detach().isfinite()
    if not bool(finite.all()):  # one wait for the device
        raise _not_finite(int((~finite).nonzero()[0, 0]), label)
    return values


@contextmanager
def named(label: Callable[[int], str]) -> Iterator[None]:
    """What a metric calls not finite within it is called what the caller calls it.

    Args:
        label: what the row at a position of the metric's answer is of.

    Raises:
        NotFinite: the metric's own, with the same position.
    """
    try:
        yield
    except NotFinite as error:
        raise _not_finite(error.position, label) from None


def checked_similarities(
    metric: Any,
    images: Any,
    references: Any,
    pairs: Sequence[tuple[int, int, str]],
    label: Callable[[int], str],
    **options: Any,
) -> Tensor:
    """What any metric answers to pairs, (N,), checked; errors call a pair what the caller calls it.

    Args:
        metric: anything with `similarity_pairs`; `tpips_reward.Metric` and a user's own give the same errors.
        images, references, pairs, options: its arguments.
        label: what the pair at a position is of, such as `name_comparison` says it.

    Raises:
        NotFinite: NaN or infinite numbers, with the position of the pair.
        TPIPSError: not one number a pair; whatever the metric raises.
    """
    with named(label):
        values = metric.similarity_pairs(images, references, pairs, **options)
    if values.shape != (len(pairs),):
        raise TPIPSError(
            f"The metric answered {tuple(values.shape)} for {len(pairs)} pairs; similarity_pairs must give one similarity "
            "a pair."
        )
    return check_finite(values, label)


def _not_finite(position: int, label: Callable[[int], str]) -> NotFinite:
    return NotFinite(
        f"The metric gives no finite number for {label(position)}: weights hold NaN or infinite numbers (fetch a damaged "
        "checkpoint again), or a computation overflows (load the metric in float32).",
        position,
    )
