"""The names of rewards: "tpips:preserve" or "tpips:preserve=0.7,tpips:target=0.3" -> RewardSpec."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tpips_reward.errors import TPIPSError
from tpips_reward.rewards.terms import MODES

# Reward families by name, each with its modes; a new family is one line here.
FAMILIES: dict[str, tuple[str, ...]] = {"tpips": tuple(MODES)}


@dataclass(frozen=True)
class RewardItem:
    """One reward of a spec: family ("tpips"), mode ("preserve") and weight in the sum."""

    family: str
    mode: str
    weight: float

    @property
    def name(self) -> str:
        return f"{self.family}:{self.mode}"


@dataclass(frozen=True)
class RewardSpec:
    """Rewards that are added, each times its weight (the weights are used as given, not normalised)."""

    items: tuple[RewardItem, ...]

    def __str__(self) -> str:
        if len(self.items) == 1 and self.items[0].weight == 1.0:
            return self.items[0].name
        return ",".join(f"{item.name}={item.weight!r}" for item in self.items)

    def requires(self, kind: str) -> bool:
        """Whether every sample must have aspects of this kind ("preserve" or "target")."""
        if kind not in ("preserve", "target"):
            raise TPIPSError(f"Aspects are of kind 'preserve' or 'target', not {kind!r}.")
        return any(kind in MODES[item.mode].needs for item in self.items)


def parse_reward(text: str | RewardSpec) -> RewardSpec:
    """Parses "family:mode[=weight][,family:mode[=weight]...]"; the weight is 1 where none is written.

    Raises:
        TPIPSError: an empty text or entry, an unknown family or mode (the message lists what exists), a weight that is
            not a positive finite number, or the same reward twice.

    >>> parse_reward("tpips:preserve=0.7, tpips:target=0.3").items[1]
    RewardItem(family='tpips', mode='target', weight=0.3)
    """
    if isinstance(text, RewardSpec):
        return text
    if not isinstance(text, str):
        raise TPIPSError(f"A reward is named by text such as 'tpips:preserve', not by a {type(text).__name__}.")
    if not text.strip():
        raise TPIPSError(f"The reward name is empty; rewards are: {known_rewards()}.")
    items = tuple(_parse_item(entry, text) for entry in text.split(","))
    names = [item.name for item in items]
    for name in names:
        if names.count(name) > 1:
            raise TPIPSError(f"Reward {name!r} stands twice in {text!r}; write it once, with the sum of its weights.")
    return RewardSpec(items)


def known_rewards() -> str:
    """The names that exist, for messages and help texts."""
    return ", ".join(f"{family}:{mode}" for family, modes in FAMILIES.items() for mode in modes)


def _parse_item(entry: str, text: str) -> RewardItem:
    if not entry.strip():
        raise TPIPSError(f"There is an empty entry in {text!r}; remove the extra comma.")
    name, equals, weight_text = (part.strip() for part in entry.partition("="))
    family, colon, mode = (part.strip() for part in name.partition(":"))
    if family not in FAMILIES:
        raise TPIPSError(f"Unknown reward {name!r}; rewards are: {known_rewards()}.")
    if mode not in FAMILIES[family]:
        problem = f"Unknown mode {mode!r} of reward {family!r}" if colon else f"Reward {family!r} needs a mode"
        raise TPIPSError(f"{problem}; write one of: {known_rewards()}.")
    return RewardItem(family, mode, _parse_weight(weight_text, name) if equals else 1.0)


def _parse_weight(text: str, name: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        raise TPIPSError(f"The weight {text!r} of {name!r} is not a number; write {name}=0.5, say.") from None
    if not (math.isfinite(weight) and weight > 0):
        raise TPIPSError(f"The weight {text} of {name!r} must be positive and finite; leave the reward out instead.")
    return weight
