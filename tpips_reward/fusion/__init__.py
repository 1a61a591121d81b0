"""Fusions: how two images and an aspect become a score. One file each, and a line here."""

from typing import Any

from tpips_reward.fusion.early import EarlyFusion
from tpips_reward.fusion.late import LateFusion
from tpips_reward.fusion.mid import MidFusion

FUSIONS: dict[str, Any] = {fusion.kind: fusion for fusion in (LateFusion, MidFusion, EarlyFusion)}

__all__ = ["FUSIONS", "EarlyFusion", "LateFusion", "MidFusion"]
