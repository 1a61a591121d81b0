"""Rewards made of a TPIPS metric: names and weights (spec), formulas (terms, gate), and the callable (reward)."""

from tpips_reward.rewards.gate import Gate
from tpips_reward.rewards.reward import PairMetric, RewardOutput, TPIPSReward
from tpips_reward.rewards.spec import RewardItem, RewardSpec, known_rewards, parse_reward

__all__ = [
    "Gate",
    "PairMetric",
    "RewardItem",
    "RewardOutput",
    "RewardSpec",
    "TPIPSReward",
    "known_rewards",
    "parse_reward",
]
