"""Resize and patches against transformers' own processor."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from tpips_reward.errors import TPIPSError
from tpips_reward.preprocess import ImageSettings, target_size, to_patches

SETTINGS = ImageSettings(patch_size=16, merge_size=2, min_pixels=64 * 64, max_pixels=256 * 256)


@pytest.fixture(scope="module")
def processor() -> Qwen2VLImageProcessor:
    return Qwen2VLImageProcessor(**{k: v for k, v in SETTINGS.to_config().items() if k != "image_processor_type"})


def test_sizes_are_those_of_transformers():
    rng = np.random.default_rng(0)
    for height, width in np.exp(rng.uniform(0, 8, (400, 2))).astype(int) + 1:
        if max(height, width) <= 200 * min(height, width):
            expected = smart_resize(height, width, 32, SETTINGS.min_pixels, SETTINGS.max_pixels)
            assert target_size(int(height), int(width), SETTINGS) == expected, (height, width)


def test_patches_are_those_of_transformers(processor, photos):
    """Where the size fits there is no resize, and the patches are equal; otherwise its uint8 route rounds."""
    for name, photo in photos.items():
        exact = photo.resize((photo.width // 32 * 32, photo.height // 32 * 32))
        for image, bound, mean_bound in ((exact, 1e-6, 1e-6), (photo, 0.3, 0.003)):
            theirs = processor(images=image, return_tensors="pt")
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
            ours, grid = to_patches([pixels], SETTINGS)[0]
            assert [1, *grid] == theirs["image_grid_thw"][0].tolist()
            error = (ours - theirs["pixel_values"]).abs()
            assert error.max() <= bound and error.mean() <= mean_bound, name


@pytest.mark.parametrize("mean, std", [((0.5,) * 3, (0.5,) * 3), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
def test_pixels_are_normalised_once(metric, photos, monkeypatch, mean, std):
    """What reaches the vision tower is (x - mean) / std of the pixels; what a caller normalised before is refused."""
    photo = photos["coffee_0"].resize((64, 64))
    pixels = torch.from_numpy(np.array(photo)).permute(2, 0, 1).float() / 255
    seen = []
    settings = dataclasses.replace(metric.backbone.settings, mean=mean, std=std)
    monkeypatch.setattr(metric.backbone, "settings", settings)
    handle = metric.backbone.model.visual.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        metric.similarity(photo, pixels)
    finally:
        handle.remove()
    (patches,) = seen  # equal images are one
    normalised = (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    for statistic in (torch.mean, torch.std, torch.amin, torch.amax):
        assert statistic(patches).item() == pytest.approx(statistic(normalised).item(), abs=1e-3)
    with pytest.raises(TPIPSError, match="a has values from -.* outside value_range"):
        metric.similarity(normalised, pixels)


def test_the_longest_shape_that_is_taken_goes_through_a_metric(metric):
    """One side exactly 200 times the other; one pixel more is refused."""
    for size in ((1, 200), (400, 2)):
        long, short = torch.rand(3, *size), torch.rand(3, 8, 8)
        assert metric.similarity(long, short, ["lighting", None]).isfinite().all()
    with pytest.raises(TPIPSError, match="a has 201x1 pixels: one side is more than 200 times the other"):
        metric.similarity(torch.rand(3, 1, 201), torch.rand(3, 8, 8))


def test_shrinking_is_antialiased_as_in_transformers(processor):
    noise = np.random.default_rng(0).integers(0, 256, (700, 900, 3), dtype=np.uint8)
    theirs = processor(images=noise, return_tensors="pt")["pixel_values"]
    pixels = torch.from_numpy(noise).permute(2, 0, 1).float() / 255
    ours, _ = to_patches([pixels], SETTINGS)[0]
    assert (ours - theirs).abs().max() < 0.02  # the uint8 route rounds to steps of 0.0078


def test_mixed_sizes_keep_their_order():
    images = [torch.rand(3, 64, 64), torch.rand(3, 100, 70), torch.rand(3, 64, 64)]
    for image, (patches, grid) in zip(images, to_patches(images, SETTINGS), strict=True):
        alone, alone_grid = to_patches([image], SETTINGS)[0]
        assert grid == alone_grid
        torch.testing.assert_close(patches, alone, atol=1e-6, rtol=0)


def test_gradients_pass_the_resize_uncut():
    image = torch.zeros(3, 50, 90, dtype=torch.float64)
    image[:, 20:, 40:] = 1  # an edge, where bicubic overshoots: a clamp would cut the gradient there
    image.requires_grad_()
    patches, _ = to_patches([image], SETTINGS)[0]
    assert patches.dtype == torch.float64 and patches.abs().max() > 1.01
    weights = torch.randn(patches.shape, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((patches * weights).sum(), image)
    step = torch.randn_like(image)
    with torch.no_grad():
        change = ((to_patches([image + step], SETTINGS)[0][0] - patches) * weights).sum()
    torch.testing.assert_close((gradient * step).sum(), change)


def test_tiny_images_are_enlarged():
    for height, width in ((1, 1), (3, 2), (27, 27), (1, 200)):
        patches, (rows, columns) = to_patches([torch.rand(3, height, width)], SETTINGS)[0]
        assert len(patches) == rows * columns and rows * columns * 256 >= SETTINGS.min_pixels


def test_extreme_shapes_are_refused():
    with pytest.raises(TPIPSError, match="402x2 pixels.*more than 200"):
        target_size(2, 402, SETTINGS)


def test_settings_come_from_every_form_of_the_config(processor):
    config = processor.to_dict()
    for source in (processor, config, {"image_processor": config}, SETTINGS, SETTINGS.to_config()):
        assert ImageSettings.from_processor(source) == SETTINGS
    old = {**config, "size": {}, "min_pixels": 4096, "max_pixels": 8192}
    assert ImageSettings.from_processor(old) == dataclasses.replace(SETTINGS, min_pixels=4096, max_pixels=8192)


@pytest.mark.parametrize("name", ["patch_size", "size", "image_mean"])
def test_a_config_that_lacks_something_is_an_error(processor, name):
    config = processor.to_dict()
    del config[name]
    with pytest.raises(TPIPSError, match="processor's config lacks"):
        ImageSettings.from_processor(config)


WITHOUT_TORCHVISION = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "torchvision" else find(name, *rest)
sys.modules["torchvision"] = None
import torch
from transformers.utils import is_torchvision_available
from tpips_reward import load_metric
assert not is_torchvision_available()
pixels = torch.rand(3, 80, 90, requires_grad=True)
load_metric(sys.argv[1], device="cpu").similarity(pixels, torch.rand(3, 64, 64)).sum().backward()
print(bool(pixels.grad.abs().sum() > 0))
"""


@pytest.mark.slow
def test_without_torchvision_there_is_still_a_gradient(parity):
    """transformers' own processor would silently fall back to a route that rounds and carries none."""
    command = [sys.executable, "-c", WITHOUT_TORCHVISION, str(parity / "embedding")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "True"
