"""The procedural world: known parameters in, known pixels, distances and measures out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tpips_reward.errors import TPIPSError
from tpips_reward.scenes import (
    ASPECTS,
    EDIT_KINDS,
    SHAPES,
    Scene,
    aspect_distance,
    measure_edit,
    object_mask,
    render,
    sample_edit,
    sample_scene,
    to_tensor,
    with_drift,
    wordings,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_render_is_exact_and_typed() -> None:
    scene = sample_scene(rng())
    first, second = render(scene), render(scene)
    assert first.dtype == np.uint8 and first.shape == (64, 64, 3)
    assert np.array_equal(first, second)
    tensor = to_tensor(first)
    assert tensor.shape == (3, 64, 64) and 0 <= tensor.min() and tensor.max() <= 1


def test_same_seed_same_scene() -> None:
    assert sample_scene(rng(3)) == sample_scene(rng(3)) != sample_scene(rng(4))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_the_area_of_the_circle_with_its_size(shape: str) -> None:
    mask = object_mask(Scene(shape=shape, size=0.2), 128)
    assert mask.mean() == pytest.approx(np.pi * 0.2**2, rel=0.04)


def test_colors_are_what_the_scene_says() -> None:
    image = render(Scene(color=(1.0, 0.5, 0.0), background_color=(0.2, 0.4, 0.6)))
    assert np.abs(image[32, 32] - np.array([255, 127.5, 0])).max() <= 1
    assert np.abs(image[2, 2] - np.array([51, 102, 153])).max() <= 1


def test_warm_light_reddens_and_brightness_scales() -> None:
    plain, warm = (render(Scene(warmth=w)).mean((0, 1)) for w in (0.0, 1.0))
    assert warm[0] > plain[0] and warm[2] < plain[2]
    assert render(Scene(brightness=0.5)).mean() == pytest.approx(render(Scene()).mean() / 2, rel=0.02)


def test_blur_keeps_the_mean_and_softens_edges() -> None:
    sharp, soft = (render(Scene(blur=b)).astype(float) for b in (0.0, 0.03))
    assert soft.mean() == pytest.approx(sharp.mean(), abs=1.0)
    assert np.abs(np.diff(soft, axis=1)).max() < 0.6 * np.abs(np.diff(sharp, axis=1)).max()


@pytest.mark.parametrize("aspect", ASPECTS)
def test_an_aspect_sees_its_parameters_and_no_others(aspect: str) -> None:
    base = Scene(shape="arrow", texture="plain")
    other = Scene(
        "star" if aspect != "rotation" else "arrow", (0.1, 0.8, 0.2), 0.27, 0.35, 0.65, 2, 90.0, "dots", (0.9, 0.8, 0.7),
        "checker", 0.7, 0.8, 0.03,
    )  # fmt: skip
    own = ASPECTS[aspect].parameters
    only = replace(base, **{p: getattr(other, p) for p in own})
    rest = replace(other, **{p: getattr(base, p) for p in own})
    assert aspect_distance(aspect, base, base) == 0
    assert aspect_distance(aspect, base, only) > 1
    if aspect not in ("overall", "rotation"):
        assert aspect_distance(aspect, base, rest) == 0


def test_rotation_is_measured_within_the_period_and_between_equal_shapes() -> None:
    square = Scene(shape="square")
    assert aspect_distance("rotation", square, replace(square, rotation=90.0)) == pytest.approx(0)
    assert aspect_distance("rotation", square, replace(square, rotation=45.0)) > 1.5
    assert aspect_distance("rotation", square, replace(square, shape="star", rotation=45.0)) == 0


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TPIPSError, match="mood"):
        aspect_distance("mood", Scene(), Scene())
    with pytest.raises(TPIPSError, match="hexagon"):
        Scene(shape="hexagon")
    with pytest.raises(TPIPSError, match="val"):
        sample_edit(rng(), "val")
    with pytest.raises(TPIPSError, match="sideways"):
        sample_edit(rng(), kind="sideways")


@pytest.mark.parametrize("aspect", [a for a in ASPECTS if a != "overall"])
def test_held_out_wordings_are_new_combinations_of_known_words(aspect: str) -> None:
    train, test = set(wordings(aspect, "train")), set(wordings(aspect, "test"))
    assert len(test) >= 3 and not train & test and aspect in train
    words = {w for a in ASPECTS for phrase in wordings(a, "train") for w in phrase.split()}
    assert {w for phrase in test for w in phrase.split()} <= words


def test_train_and_test_edits_never_share_a_combination() -> None:
    source = rng()
    combos = {
        split: {(e.kind, e.source.shape, e.value) for e in (sample_edit(source, split) for _ in range(400))}
        for split in ("train", "test")
    }
    assert not combos["train"] & combos["test"]
    assert {kind for kind, _, _ in combos["test"]} == set(EDIT_KINDS)


@pytest.mark.parametrize("kind", EDIT_KINDS)
def test_measures_tell_ideal_copy_and_destruction_apart(kind: str) -> None:
    source = rng(1)
    for _ in range(12):
        edit = sample_edit(source, "test", kind)
        assert not set(edit.target) & set(edit.preserve) and edit.value in edit.instruction
        ideal, copy = (measure_edit(edit, render(s)) for s in (edit.ideal, edit.source))
        assert ideal.success and not ideal.copied and not ideal.object_lost
        assert ideal.l1_to_ideal == 0 and (np.isnan(ideal.drift) or ideal.drift == 0)
        assert not copy.success and copy.copied and copy.l1_to_ideal > 0
        noise = measure_edit(edit, source.integers(0, 255, (64, 64, 3), dtype=np.uint8))
        assert not noise.copied and (np.isnan(noise.drift) or noise.drift > 0.1)


def test_an_erased_object_is_lost() -> None:
    source = rng(2)
    for _ in range(20):
        edit = sample_edit(source, "test", "size")
        erased = replace(edit.ideal, size=1e-3, x=0.0, y=0.0)
        assert measure_edit(edit, render(erased)).object_lost


@pytest.mark.parametrize("seed", range(4))
def test_drift_weighs_object_and_background_equally(seed: int) -> None:
    # The object fills a tenth of the image or less: a wrong object still counts as much as a wrong background.
    edit = sample_edit(rng(seed), "train", "shape")
    image = render(edit.ideal).astype(np.int64)
    is_object = object_mask(edit.ideal) > 0.5
    stays = np.abs(image - render(edit.source)).max(-1) <= 0.03 * 255
    drifts = []
    for region in (is_object & stays, ~is_object & stays):
        shifted = image.copy()
        shifted[region] += np.where(shifted[region] > 127, -51, 51)
        drifts.append(measure_edit(edit, shifted.astype(np.uint8)).drift)
    assert drifts == pytest.approx([0.1, 0.1], rel=0.01)


def test_drifted_targets_keep_the_edit_and_change_something_else() -> None:
    source = rng(7)
    edits = [sample_edit(source) for _ in range(60)]
    assert all(with_drift(e, source, 0.0) == e.ideal for e in edits)
    drifted = [(e, with_drift(e, source, 1.0)) for e in edits]
    assert all(d != e.ideal for e, d in drifted)
    assert np.mean([measure_edit(e, render(d)).success for e, d in drifted]) > 0.85


def test_measure_edit_refuses_what_it_cannot_measure() -> None:
    edit = sample_edit(rng())
    with pytest.raises(TPIPSError, match="shape"):
        measure_edit(edit, torch.zeros(3, 32, 64))
    with pytest.raises(TPIPSError, match="NaN"):
        measure_edit(edit, torch.full((3, 64, 64), float("nan")))
