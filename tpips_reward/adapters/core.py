"""What every foreign trainer needs: from its prompts and columns to the aspects of a reward, and scores that are numbers.

A trainer gives edits, sources, prompts and perhaps a dict a sample. The aspects of a sample are, in this order, its own
("preserve" and "target" in the dict), those given for all samples, or those that rules propose from the instruction
(`tpips_reward.aspects`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpips_reward.aspects import propose
from tpips_reward.errors import TPIPSError
from tpips_reward.rewards.reward import RewardOutput

#: Anything that is called as `TPIPSReward` is: that, or a `RemoteReward`.
RewardCall = Callable[..., RewardOutput]


@dataclass(frozen=True)
class SampleAspects:
    """The aspects of one sample."""

    preserve: tuple[str, ...]
    target: tuple[str, ...]


def aspects_of(
    prompt: str,
    metadata: Mapping[str, Any] | str | None,
    preserve: str | Sequence[str] | None = (),
    target: str | Sequence[str] | None = (),
) -> SampleAspects:
    """The aspects of one sample; see the module's docstring.

    Args:
        prompt: the instruction.
        metadata: what the trainer keeps for the sample; JSON text is read.
        preserve, target: for samples that name none. One string is one aspect, here and in the metadata.

    Raises:
        TPIPSError: metadata that is no JSON object, aspects that are no list of texts, or neither aspects nor a prompt.
    """
    own = _object(metadata)
    kept = _names(own.get("preserve"), "A sample's metadata have preserve") or _names(preserve, "preserve")
    changed = _names(own.get("target"), "A sample's metadata have target") or _names(target, "target")
    if kept or changed:
        return SampleAspects(kept, changed)
    if not isinstance(prompt, str) or not prompt.strip():
        raise TPIPSError(f"A sample names no aspects and its prompt is {prompt!r}; give preserve and target aspects.")
    proposal = propose(prompt)
    return SampleAspects(proposal.preserve, proposal.target)


def _object(metadata: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    content: Any = metadata
    if isinstance(metadata, str):
        try:
            content = json.loads(metadata) if metadata.strip() else None
        except (ValueError, RecursionError) as error:
            raise TPIPSError(f"A sample's metadata are no JSON ({error}): {metadata[:80]!r}.") from None
    if content is not None and not isinstance(content, Mapping):
        raise TPIPSError(f"A sample's metadata are a {type(content).__name__}; give a dict, or JSON text of one.")
    return content or {}


def _names(given: Any, place: str) -> tuple[str, ...]:
    """One aspect, or a list of them; `place` begins what is said of anything else."""
    if given is None:
        return ()
    entries = [given] if isinstance(given, str) else given
    if hasattr(entries, "tolist"):  # parquet columns come as arrays
        entries = entries.tolist()
    if not isinstance(entries, Sequence) or not all(isinstance(entry, str) for entry in entries):
        raise TPIPSError(f"{place}={given!r}; give a list of aspects.")
    return tuple(entries)


@dataclass(frozen=True)
class EditScorer:
    """A reward for samples as foreign trainers give them.

    Attributes:
        reward: a `TPIPSReward` or a `RemoteReward`.
        preserve, target: aspects of samples that name none; empty lets rules propose them from the instruction. One string is one aspect.

    Raises:
        TPIPSError: aspects that are no list of texts.
    """

    reward: RewardCall
    preserve: str | Sequence[str] | None = ()
    target: str | Sequence[str] | None = ()

    def __post_init__(self) -> None:
        for name in ("preserve", "target"):
            object.__setattr__(self, name, _names(getattr(self, name), name))

    def __call__(
        self,
        images: Sequence[Any],
        sources: Sequence[Any],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any] | str | None] | None = None,
        target_images: Sequence[Any] | None = None,
    ) -> RewardOutput:
        """Scores B edits, each beside its own source and prompt.

        Raises:
            TPIPSError: wrong numbers, a sample without a source, and whatever the reward raises. Nothing turns into 0.
        """
        count = len(images)
        given = {"sources": sources, "prompts": prompts, "metadata": metadata, "target_images": target_images}
        for name, values in given.items():
            if values is not None and len(values) != count:
                raise TPIPSError(f"{name} has {len(values)} entries for {count} images; give one each.")
        for index, source in enumerate(sources):
            if source is None:
                raise TPIPSError(
                    f"Sample {index} has no source image; an edit is scored against what it was made from."
                )
        rows = metadata if metadata is not None else [None] * count
        aspects = [
            aspects_of(prompt, row, self.preserve, self.target) for prompt, row in zip(prompts, rows, strict=True)
        ]
        output = self.reward(
            list(images),
            list(sources),
            preserve=[list(a.preserve) for a in aspects],
            target=[list(a.target) for a in aspects],
            target_images=None if target_images is None else list(target_images),
        )
        for index, score in enumerate(output.scores.detach().tolist()):
            if not math.isfinite(score):
                raise TPIPSError(
                    f"The reward gave {score} for sample {index}; training on it would spread it: stopped."
                )
        return output
