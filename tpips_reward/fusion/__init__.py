"""Fusions: how images and an aspect become a score, or a choice. One file each, and a line here."""

from typing import Any

from tpips_reward.fusion.early import EarlyFusion
from tpips_reward.fusion.late import LateFusion
from tpips_reward.fusion.mid import MidFusion
from tpips_reward.fusion.triplet import TripletJudge

FUSIONS: dict[str, Any] = {fusion.kind: fusion for fusion in (LateFusion, MidFusion, EarlyFusion, TripletJudge)}

__all__ = ["FUSIONS", "EarlyFusion", "LateFusion", "MidFusion", "TripletJudge"]
