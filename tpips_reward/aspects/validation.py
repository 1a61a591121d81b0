"""What a proposed aspect must look like: the refinement rules of the TPIPS paper (appendix on aspect proposal).

A single short noun phrase; none of the words "and", "or", "not"; no symbols; five to ten in all, most important first.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpips_reward.errors import TPIPSError
from tpips_reward.rewards.aspects import check_disjoint, sample_aspects

MAX_ASPECTS = 10
MAX_WORDS = 6
MAX_LETTERS = 60
_FORBIDDEN = ("and", "or", "not")


def check_proposed(preserve: Sequence[str], target: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Proposed aspects, stripped.

    Raises:
        TPIPSError: an aspect that breaks the rules above, is there twice, or is both to keep and to change; more than
            ten; none at all.
    """
    kept, changed = sample_aspects(preserve, "preserve"), sample_aspects(target, "target")
    check_disjoint([kept], [changed])
    if not kept and not changed:
        raise TPIPSError("No aspects are named; give at least one to keep or to change.")
    if len(kept) + len(changed) > MAX_ASPECTS:
        raise TPIPSError(f"{len(kept) + len(changed)} aspects are too many; name the {MAX_ASPECTS} most important.")
    for aspect in (*kept, *changed):
        check_phrase(aspect)
    return tuple(kept), tuple(changed)


def check_phrase(aspect: str) -> None:
    """Refuses what is no single short noun phrase.

    Raises:
        TPIPSError: too long, a symbol, or one of the words "and", "or", "not".
    """
    words = aspect.split()
    if len(words) > MAX_WORDS or len(aspect) > MAX_LETTERS:
        raise TPIPSError(f"The aspect {aspect!r} is too long; name one thing in at most {MAX_WORDS} words.")
    joined = [word for word in words if word.casefold() in _FORBIDDEN]
    if joined:
        raise TPIPSError(f"The aspect {aspect!r} holds the word {joined[0]!r}; name one thing an aspect.")
    symbols = sorted({letter for letter in aspect if not (letter.isalnum() or letter in " -'’")})
    if symbols:
        raise TPIPSError(f"The aspect {aspect!r} holds {symbols[0]!r}; an aspect is a plain noun phrase.")
