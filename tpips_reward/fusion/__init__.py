"""Fusions: how two images and an aspect become a score. One file each, and a line here."""

from typing import Any

from tpips_reward.fusion.late import LateFusion

FUSIONS: dict[str, Any] = {LateFusion.kind: LateFusion}

__all__ = ["FUSIONS", "LateFusion"]
