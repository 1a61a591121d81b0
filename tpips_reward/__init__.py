"""TPIPS: perceptual similarity of images in a named aspect, as a metric and as a reward.

    from tpips_reward import TPIPSReward, load_metric

Names are imported on first use, so that `import tpips_reward` and `tpips-reward --help` stay quick.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from tpips_reward.errors import TPIPSError

if TYPE_CHECKING:
    from tpips_reward.checkpoints import load_metric
    from tpips_reward.metric import Metric
    from tpips_reward.rewards import RewardOutput, TPIPSReward
    from tpips_reward.rewards.loading import load_reward
    from tpips_reward.serving.client import RemoteReward

try:
    __version__ = version("tpips-reward")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"

_HOMES = {
    "Metric": "tpips_reward.metric",
    "RemoteReward": "tpips_reward.serving.client",
    "RewardOutput": "tpips_reward.rewards",
    "TPIPSReward": "tpips_reward.rewards",
    "load_metric": "tpips_reward.checkpoints",
    "load_reward": "tpips_reward.rewards.loading",
}

__all__ = [
    "Metric",
    "RemoteReward",
    "RewardOutput",
    "TPIPSError",
    "TPIPSReward",
    "__version__",
    "load_metric",
    "load_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tpips_reward' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
