"""The aspects of a call: every accepted way of writing them -> one list of aspect names a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpips_reward.errors import TPIPSError

AspectsArgument = str | Sequence[Any] | None


def aspect_lists(given: AspectsArgument, count: int, name: str) -> list[list[str]]:
    """One list of stripped aspect names for each of `count` samples.

    Args:
        given: None (no aspects), one aspect (a str, for all samples), one list of aspects for all samples
            (`["background", "lighting"]` or `[["background", "lighting"]]`), or one entry a sample: a list, a str
            or None.
        count: number of samples.
        name: "preserve" or "target", for messages.

    Raises:
        TPIPSError: an empty aspect, the same aspect twice in a sample, a wrong number of entries, something that is
            not text, or a flat list with as many aspects as samples, which can be read in two ways.
    """
    if given is None:
        return [[] for _ in range(count)]
    if isinstance(given, str):
        return [_clean_list([given], name, None)] * count
    if not isinstance(given, Sequence):
        raise TPIPSError(
            f"{name} is a {type(given).__name__}; give an aspect, a list of aspects for all samples, or a list of "
            "lists, one a sample."
        )
    entries = list(given)
    if entries and all(isinstance(entry, str) for entry in entries):
        if len(entries) == count > 1:
            raise TPIPSError(
                f"{name}={entries!r} has {len(entries)} aspects for {count} samples and can be read in two ways; "
                f"write [{entries!r}] for one list for all samples, or {[[entry] for entry in entries]!r} for one "
                "aspect a sample."
            )
        return [_clean_list(entries, name, None)] * count
    if len(entries) not in (1, count):
        raise TPIPSError(
            f"{name} has {len(entries)} entries for {count} images; give one list of aspects a sample, or one list "
            "for all of them."
        )
    if len(entries) == 1:
        entries = entries * count
    return [_clean_entry(entry, name, index) for index, entry in enumerate(entries)]


def sample_aspects(given: str | Sequence[str], name: str) -> list[str]:
    """The aspects of a single sample, stripped; one string is one aspect.

    Raises:
        TPIPSError: as `aspect_lists`.
    """
    return aspect_lists([given if isinstance(given, str) else list(given)], 1, name)[0]


def check_disjoint(preserve: Sequence[Sequence[str]], target: Sequence[Sequence[str]]) -> None:
    """Raises TPIPSError where a sample names one aspect as both to keep and to change."""
    for index, (kept, changed) in enumerate(zip(preserve, target, strict=True)):
        both = {_key(aspect) for aspect in kept} & {_key(aspect) for aspect in changed}
        if both:
            raise TPIPSError(
                f"{sample_name(index, len(preserve))} has {min(both)!r} both in preserve and in target; an aspect is either to keep "
                "or to change: drop it from one of the two."
            )


def sample_name(index: int, count: int) -> str:
    """What messages call a sample; one that is alone has no number, which would not be its own in a larger request."""
    return f"Sample {index}" if count > 1 else "The sample"


def _clean_entry(entry: Any, name: str, index: int) -> list[str]:
    if entry is None:
        return []
    if isinstance(entry, str):
        return _clean_list([entry], name, index)
    if isinstance(entry, Sequence):
        return _clean_list(entry, name, index)
    raise TPIPSError(
        f"{name}[{index}] is a {type(entry).__name__} ({entry!r}); an entry is a list of aspects, one aspect, or None."
    )


def _clean_list(aspects: Sequence[Any], name: str, index: int | None) -> list[str]:
    where = name if index is None else f"{name}[{index}]"
    cleaned: list[str] = []
    seen: set[str] = set()
    for aspect in aspects:
        if not isinstance(aspect, str):
            raise TPIPSError(f"{where} holds {aspect!r}, which is not text; an aspect is a short noun phrase.")
        aspect = aspect.strip()
        if not aspect:
            raise TPIPSError(
                f'{where} holds an empty aspect; name it, or write "overall" to compare the images as a whole.'
            )
        if _key(aspect) in seen:
            raise TPIPSError(f"{where} names {aspect!r} twice; each aspect counts once: drop one.")
        seen.add(_key(aspect))
        cleaned.append(aspect)
    return cleaned


def _key(aspect: str) -> str:
    """Aspects that differ in case or blanks only are one aspect to a reader."""
    return " ".join(aspect.split()).casefold()
