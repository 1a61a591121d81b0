"""The procedural world: scenes with known parameters, their aspects, edits with known ideals, and measures of edits.

It serves the metric's training data, the built-in editor's training data and the evaluation of RL runs, where the known
parameters make an independent judge: none of the measures here uses the metric that a run optimises.
"""

from tpips_reward.scenes.aspects import ASPECTS, Aspect, aspect_distance, wordings
from tpips_reward.scenes.edits import EDIT_KINDS, Edit, sample_edit, with_drift
from tpips_reward.scenes.measure import EditMeasures, measure_edit
from tpips_reward.scenes.render import object_mask, render, to_tensor
from tpips_reward.scenes.scene import (
    BACKGROUND_COLORS,
    OBJECT_COLORS,
    PATTERNS,
    SHAPES,
    TEXTURES,
    Scene,
    sample_scene,
)

__all__ = [
    "ASPECTS",
    "BACKGROUND_COLORS",
    "EDIT_KINDS",
    "OBJECT_COLORS",
    "PATTERNS",
    "SHAPES",
    "TEXTURES",
    "Aspect",
    "Edit",
    "EditMeasures",
    "Scene",
    "aspect_distance",
    "measure_edit",
    "object_mask",
    "render",
    "sample_edit",
    "sample_scene",
    "to_tensor",
    "with_drift",
    "wordings",
]
