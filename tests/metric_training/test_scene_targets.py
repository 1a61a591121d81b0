"""What a vision tower from scratch learns of procedural scenes: their parameters, and where the object is."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from metric_training.attributes import CoverageHead, attribute_targets, coverage_loss, coverage_targets
from metric_training.training.config import TrainConfig
from metric_training.training.examples import FreshScenes
from tpips_reward.preprocess import ImageSettings, patchify
from tpips_reward.scenes import Scene, object_mask, render, to_tensor


def test_a_tokens_parts_are_those_of_its_place_in_the_image() -> None:
    scene = Scene(shape="arrow", x=0.4, y=0.6, rotation=30)
    found = coverage_targets([Scene(), scene], 16)
    assert found.shape == (2, 16, 64) and found.dtype == torch.float32
    rows = [torch.cat([found[1, 4 * row + column].view(8, 8) for column in range(4)], 1) for row in range(4)]
    assert torch.equal(torch.cat(rows), torch.from_numpy(object_mask(scene, 32)))
    # where the tower's own patches lie: the four of a token follow one another, in a white square that only this token sees
    settings = ImageSettings(patch_size=8, min_pixels=64, max_pixels=64**2)
    for token in range(16):
        row, column = divmod(token, 4)
        image = torch.zeros(1, 3, 64, 64)
        image[..., 16 * row : 16 * row + 16, 16 * column : 16 * column + 16] = 1.0
        lit = patchify(image, settings)[0].bool().any(1).nonzero().flatten().tolist()
        assert lit == [4 * token + k for k in range(4)]


def test_the_loss_of_coverage_is_least_for_the_object_itself() -> None:
    scene = Scene(shape="star")
    wanted = coverage_targets([scene], 16)
    right = torch.logit(wanted.clamp(1e-4, 1 - 1e-4))
    turned = torch.logit(coverage_targets([replace(scene, rotation=36)], 16).clamp(1e-4, 1 - 1e-4))
    p = wanted.clamp(1e-4, 1 - 1e-4)
    entropy = float(-(wanted * p.log() + (1 - wanted) * (1 - p).log()).mean())
    assert float(coverage_loss(right, wanted)) == pytest.approx(entropy, abs=1e-5)
    assert float(coverage_loss(turned, wanted)) > 2 * entropy
    assert float(coverage_loss(torch.zeros_like(wanted), wanted)) == pytest.approx(math.log(2))
    assert CoverageHead(5)(torch.zeros(2, 16, 5)).shape == wanted.expand(2, -1, -1).shape


def test_the_scenes_of_a_start_stand_at_any_angle_and_follow_from_the_seed() -> None:
    scenes = [FreshScenes(TrainConfig(seed=3))[0, number].scene for number in range(200)]
    angles = np.array([scene.rotation for scene in scenes])
    assert np.histogram(angles, bins=4, range=(-180, 180))[0].min() > 25
    again = FreshScenes(TrainConfig(seed=3))[7, 11]
    assert again.scene == scenes[11] and torch.equal(again.image, to_tensor(render(again.scene)))
    assert FreshScenes(TrainConfig(seed=4))[0, 11].scene != scenes[11]


def test_angles_count_where_they_can_be_seen() -> None:
    targets = attribute_targets([Scene(shape="circle"), Scene(shape="square", rotation=90), Scene(shape="square")])
    assert targets["mask"][:, -2:].tolist() == [[0, 0], [1, 1], [1, 1]]
    assert torch.allclose(targets["continuous"][1], targets["continuous"][2], atol=1e-5), "a square's quarter turn cannot be seen"
