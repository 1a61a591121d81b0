"""A reward by its name, here or on another machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpips_reward.rewards.reward import TPIPSReward
from tpips_reward.serving.client import PREFIX, RemoteReward

if TYPE_CHECKING:
    from tpips_reward.rewards.spec import RewardSpec


def load_reward(name: str | RewardSpec = "tpips:preserve", **options: Any) -> TPIPSReward | RemoteReward:
    """A `RemoteReward` for "remote:http://host:port", a `TPIPSReward` for everything else; both are called alike.

    Args:
        name: "tpips:preserve", "tpips:preserve=0.7,tpips:target=0.3" or "remote:http://host:port".
        **options: of the class that it becomes.

    Raises:
        TPIPSError: as there.
    """
    if isinstance(name, str) and name.strip().startswith(PREFIX):
        return RemoteReward(name.strip(), **options)
    return TPIPSReward(name, **options)
