"""The samples of a call, checked: what a reward here and a reward on a server refuse alike, before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpips_reward.errors import TPIPSError
from tpips_reward.rewards.aspects import AspectsArgument, aspect_lists, check_disjoint, sample_aspects, sample_name
from tpips_reward.rewards.pairs import image_list, one_each
from tpips_reward.rewards.spec import RewardSpec


@dataclass(frozen=True)
class Samples:
    """B samples, an entry each.

    Attributes:
        edits, sources: images, as they were given; one source for all is the same object B times.
        ideals: target images, None where there is none.
        kept, changed: aspects to keep and to change.
    """

    edits: list[Any]
    sources: list[Any]
    ideals: list[Any]
    kept: list[list[str]]
    changed: list[list[str]]


def read_samples(
    images: Any, references: Any, preserve: AspectsArgument, target: AspectsArgument, target_images: Any = None
) -> Samples:
    """The arguments of a reward's call, one entry a sample.

    Raises:
        TPIPSError: no images, wrong numbers of images or aspects, empty, doubled or contradictory aspects, and a target
            image without target aspects.
    """
    edits = image_list(images)
    count = len(edits)
    if not count:
        raise TPIPSError("images is empty; a reward needs at least one edit.")
    sources = one_each(image_list(references), count, "references")
    ideals = [None] * count
    if target_images is not None:
        ideals = one_each(image_list(target_images), count, "target_images")
    kept, changed = aspect_lists(preserve, count, "preserve"), aspect_lists(target, count, "target")
    check_disjoint(kept, changed)
    for index, ideal in enumerate(ideals):
        if ideal is not None and not changed[index]:
            raise TPIPSError(
                f"{sample_name(index, count)} has a target image and no target aspects; say in target which aspects of the "
                "target image count."
            )
    return Samples(edits, sources, ideals, kept, changed)


def check_needed(spec: RewardSpec, kept: Sequence[Sequence[str]], changed: Sequence[Sequence[str]]) -> None:
    """Raises TPIPSError where a sample lacks aspects that the reward needs."""
    for kind, lists in (("preserve", kept), ("target", changed)):
        missing = [index for index, aspects in enumerate(lists) if not aspects]
        if missing and spec.requires(kind):
            raise TPIPSError(
                f"{sample_name(missing[0], len(lists))} has no {kind} aspects, which {spec} needs; pass {kind}=[[...]] with at "
                "least one aspect a sample."
            )


def read_aspects(spec: RewardSpec, preserve: Sequence[str], target: Sequence[str]) -> tuple[list[str], list[str]]:
    """The aspects of one sample, cleaned.

    Raises:
        TPIPSError: empty, doubled or contradictory aspects, or none of a kind that the reward needs.
    """
    kept, changed = sample_aspects(preserve, "preserve"), sample_aspects(target, "target")
    check_disjoint([kept], [changed])
    check_needed(spec, [kept], [changed])
    return kept, changed
