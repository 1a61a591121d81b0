"""Signs of a fooled reward, on images whose answer is known and on rendered scenes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_recipes.algorithms.hacks import copies, degenerate, edge_density, largest_change
from tpips_reward.errors import TPIPSError
from tpips_reward.scenes import render, sample_edit, to_tensor


@pytest.fixture(scope="module")
def edits():
    """Sources and ideals of 40 procedural edits, (40, 3, 64, 64) each."""
    rng = np.random.default_rng(11)
    drawn = [sample_edit(rng, "train") for _ in range(40)]
    return tuple(
        torch.stack([to_tensor(render(getattr(e, which), 64)) for e in drawn]) for which in ("source", "ideal")
    )


def _noise(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def _grey(values):
    return torch.as_tensor(values, dtype=torch.float32).expand(3, -1, -1)


def test_edge_density_by_hand():
    # A step of 0.5 between columns 1 and 2 of 5 x 5: of the 4 x 4 pixels with both neighbours, one column sees it.
    step = torch.zeros(5, 5)
    step[:, 2:] = 0.5
    assert edge_density([_grey(step)]).tolist() == [0.25]
    assert edge_density([_grey(step)], threshold=0.6).tolist() == [0.0]
    assert edge_density([_grey(step.T)]).tolist() == [0.25]


def test_edge_density_weighs_the_channels_as_luminance():
    blue, green = torch.zeros(2, 3, 4, 4)
    blue[2, :, 2:], green[1, :, 2:] = 0.5, 0.5  # 0.057 and 0.2935 of luminance
    assert edge_density([blue, green]).tolist() == pytest.approx([0.0, 1 / 3])


def test_edge_density_sees_a_grid_that_alternates_at_every_pixel():
    grid = torch.zeros(8, 8)
    grid[::2, ::2] = grid[1::2, 1::2] = 1.0
    assert edge_density([_grey(grid)]).tolist() == [1.0]


def test_edge_density_of_scenes_falls_with_blur_and_rises_with_noise(edits):
    sources, _ = edits
    plain = edge_density(sources)
    blurred = torch.nn.functional.avg_pool2d(sources, 9, stride=1, padding=4, count_include_pad=False)
    assert edge_density(blurred).mean() < 0.5 * plain.mean()
    assert edge_density(0.5 * sources + 0.5 * _noise(40, 3, 64, 64)).mean() > 10 * plain.mean()


def test_degenerate_images_are_told_apart():
    images = torch.stack(
        [
            torch.zeros(3, 32, 32),
            torch.full((3, 32, 32), 0.5) + 0.01 * _noise(3, 32, 32),
            torch.ones(3, 32, 32),
            _noise(3, 32, 32),
            torch.tensor([1.0, 0.0, 0.3]).reshape(3, 1, 1).expand(3, 32, 32),
            torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(1)).clamp(0, 1),
        ]
    )
    found = degenerate(images)
    assert found.black.tolist() == [True, False, False, False, False, False]
    assert found.flat.tolist() == [True, True, True, False, True, False]
    assert found.noise.tolist() == [False, False, False, True, False, True]
    assert found.any().tolist() == [True] * 6


def test_scenes_and_true_edits_are_not_degenerate(edits):
    assert not any(degenerate(images).any().any() for images in edits)


def test_noise_over_a_scene_is_found_where_it_prevails(edits):
    sources, _ = edits
    assert degenerate(0.1 * sources + 0.9 * _noise(40, 3, 64, 64)).noise.all()
    assert not degenerate(0.95 * sources + 0.05 * _noise(40, 3, 64, 64)).noise.any()


def test_largest_change_by_hand():
    source, edit = torch.zeros(2, 3, 8, 8)
    edit[0, :2, :2] = 0.9  # a quarter of one cell of 4 x 4 pixels, in one of three channels
    assert largest_change([edit], [source], cells=2).tolist() == pytest.approx([0.9 / 4 / 3])
    assert largest_change([edit], [source], cells=1).tolist() == pytest.approx([0.9 / 16 / 3])
    assert largest_change([edit], [source], cells=4).tolist() == pytest.approx([0.3])


def test_copies_with_the_errors_of_an_autoencoder_are_found_and_true_edits_are_not(edits):
    sources, ideals = edits
    # Smoothed, shifted in brightness and with noise: about 36 dB, little better than the built-in autoencoder.
    soft = 0.75 * sources + 0.25 * torch.nn.functional.avg_pool2d(sources, 3, 1, 1, count_include_pad=False)
    near = (soft + 0.005 + 0.05 * (_noise(40, 3, 64, 64) - 0.5)).clamp(0, 1)
    assert (near - sources).square().mean() > 2e-4
    assert copies(near, sources).all()
    assert copies(sources, sources).all()
    assert not copies(ideals, sources).any()
    # What the cells are for: the mean over the whole image finds some true edits smaller than such errors.
    assert largest_change(ideals, sources, cells=1).min() < largest_change(near, sources, cells=1).max()


def test_lists_may_hold_several_sizes():
    images = [_noise(3, 16, 24), torch.zeros(3, 5, 7)]
    assert edge_density(images).shape == (2,)
    assert degenerate(images).flat.tolist() == [False, True]
    assert copies(images, [torch.zeros(3, 16, 24), torch.zeros(3, 5, 7)]).tolist() == [False, True]


def test_no_graph_is_built():
    image = _noise(1, 3, 8, 8).requires_grad_()
    assert not edge_density(image).requires_grad
    assert not largest_change(image, torch.zeros(1, 3, 8, 8)).requires_grad
    assert not degenerate(image).black.requires_grad


def test_half_precision_is_measured_in_float32():
    image = _noise(1, 3, 32, 32)
    assert edge_density(image.bfloat16()).dtype == torch.float32
    assert edge_density(image.bfloat16()).item() == pytest.approx(edge_density(image).item(), abs=0.02)


def test_bad_images_are_named():
    good = torch.zeros(3, 8, 8)
    for measure in (edge_density, degenerate):
        with pytest.raises(TPIPSError, match="no images"):
            measure([])
        with pytest.raises(TPIPSError, match="torch.uint8"):
            measure([good.to(torch.uint8)])
        with pytest.raises(TPIPSError, match=r"\(1, 8, 8\)"):
            measure([good[:1]])
        with pytest.raises(TPIPSError, match="NaN"):
            measure([good * float("nan")])
    with pytest.raises(TPIPSError, match="1 and 2"):
        copies([good], [good, good])
    with pytest.raises(TPIPSError, match="no images"):
        copies([], [])
    with pytest.raises(TPIPSError, match="source to the edit's size"):
        copies([good], [torch.zeros(3, 8, 9)])
    with pytest.raises(TPIPSError, match="cells"):
        copies([good], [good], cells=0)
