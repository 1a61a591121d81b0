"""Procedural sets: photographs under known changes, 2AFC by the same voters, seeds that make both exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bad_input import detailed_picture
from PIL import Image

from metric_training.data.comparison import CHOICE_PAIRS, DataError
from metric_training.data.photo_changes import (
    MAX_ROTATION,
    PHOTO_ASPECTS,
    PHOTO_PARTS,
    Change,
    apply_change,
    photo_distance,
    photo_wordings,
    sample_change,
)
from metric_training.data.photographs import (
    Photograph,
    load_photographs,
    photograph,
    sample_photo_triplet,
    shipped_photographs,
)
from metric_training.data.procedural import KINDS, distance_between, held_out_triplets, procedural_data, two_afc
from metric_training.data.triplets import sample_triplet
from metric_training.data.votes import PAIRS, Voters
from tpips_reward import TPIPSError


@pytest.fixture(scope="module")
def photo() -> Photograph:
    return photograph("drawn", detailed_picture())


def test_each_change_does_what_its_name_says() -> None:
    image = detailed_picture()
    plain = apply_change(image, Change(), 40).astype(float)
    assert plain.shape == (40, 60, 3)  # the photograph's own aspect ratio

    def changed(**parameters: float | bool) -> np.ndarray:
        return apply_change(image, Change(**parameters), 40).astype(float)  # type: ignore[arg-type]

    assert changed(brightness=0.5).mean() == pytest.approx(plain.mean() / 2, abs=1)
    warm = changed(warmth=0.5)
    assert warm[..., 0].mean() > plain[..., 0].mean() and warm[..., 2].mean() < plain[..., 2].mean()
    assert changed(contrast=0.5).std() == pytest.approx(plain.std() / 2, rel=0.3)
    gray = changed(saturation=0.0)
    assert np.ptp(gray, axis=-1).max() == 0
    assert np.abs(np.diff(changed(blur=0.04), axis=1)).mean() < 0.7 * np.abs(np.diff(plain, axis=1)).mean()
    noisy = changed(noise=0.1) - plain
    assert noisy.std() == pytest.approx(25.5, rel=0.15) and abs(noisy.mean()) < 2
    assert np.array_equal(changed(noise=0.1), changed(noise=0.1))
    assert not np.array_equal(changed(noise=0.1), changed(noise=0.1, noise_seed=1))
    assert np.abs(changed(mirror=True) - plain[:, ::-1]).mean() < 1
    # zoomed in twice, the middle quarter fills the image
    middle = np.asarray(Image.fromarray(plain[10:30, 15:45].astype(np.uint8)).resize((60, 40)), float)
    assert np.abs(changed(zoom=2.0) - middle).mean() < 6 < np.abs(plain - middle).mean()


def test_no_corner_shows_at_any_angle() -> None:
    white = Image.new("RGB", (90, 60), "white")
    for angle in (-MAX_ROTATION, 7.0, MAX_ROTATION):
        assert apply_change(white, Change(rotation=angle), 30).min() == 255
    assert apply_change(white.resize((60, 90)), Change(rotation=MAX_ROTATION, mirror=True), 30).min() == 255


def test_a_rotation_turns_counter_clockwise() -> None:
    image = Image.new("L", (90, 90), 0)
    image.paste(255, (0, 0, 90, 45))  # the upper half is white
    turned = apply_change(image.convert("RGB"), Change(rotation=15), 30)[..., 0].astype(float)
    assert turned[:, 25:].mean() < turned[:, :5].mean() - 40  # the edge's right end went up, and less is above it
    mirrored = apply_change(image.convert("RGB"), Change(rotation=15, mirror=True), 30)[..., 0].astype(float)
    assert np.abs(mirrored - turned).mean() < 2  # the angle is that of what is seen


def test_distances_are_known() -> None:
    a, b = Change(brightness=0.9, zoom=1.2, blur=0.01), Change(brightness=0.6, zoom=1.2, mirror=True)
    assert photo_distance("brightness", a, b) == pytest.approx(np.log(1.5) / 0.18)
    assert photo_distance("sharpness", a, b) == pytest.approx(2)
    assert photo_distance("mirroring", a, b) == 2 and photo_distance("zoom", a, b) == 0
    assert photo_distance("composition", a, b) == pytest.approx(2)
    assert photo_distance("image quality", a, a) == 0
    assert photo_distance("overall", a, b) == pytest.approx(np.sqrt((np.log(1.5) / 0.18) ** 2 + 4 + 4))
    with pytest.raises(TPIPSError, match="brightness"):
        photo_distance("shape", a, b)


def test_changes_that_cannot_be_applied_are_refused() -> None:
    for bad in ({"brightness": 0}, {"zoom": 0.5}, {"rotation": 45}, {"noise": -0.1}):
        with pytest.raises(TPIPSError, match="cannot be applied"):
            replace(Change(), **bad)


def test_wordings_for_testing_are_never_trained_on() -> None:
    seen: dict[str, str] = {}
    for name in PHOTO_ASPECTS:
        train, test = photo_wordings(name), photo_wordings(name, "test")
        assert train[0] == name and not set(train) & set(test) and (test or name == "overall")
        for phrase in (*train, *test):
            assert seen.setdefault(phrase, name) == name, phrase  # no phrase means two things
    with pytest.raises(TPIPSError, match="'train' and 'test'"):
        photo_wordings("noise", "dev")


def test_photo_triplets_are_well_formed_and_repeat_with_their_seed(photo: Photograph) -> None:
    first, second = (sample_photo_triplet(np.random.default_rng(3), [photo], size=32) for _ in range(2))
    assert first.changes == second.changes and first.wordings == second.wordings
    assert all(np.array_equal(a, b) for a, b in zip(first.images, second.images, strict=True))
    rng = np.random.default_rng(4)
    odd, right, sizes, spread = [], [], [], []
    for _ in range(40):
        triplet = sample_photo_triplet(rng, [photo], size=16, split="test")
        assert np.allclose(triplet.votes.sum(1), 1) and triplet.images[0].shape == (16, 24, 3)
        assert len(set(triplet.aspects)) == len(triplet.aspects) <= 7
        for name, phrase, votes in zip(triplet.aspects, triplet.wordings, triplet.votes, strict=True):
            assert phrase in photo_wordings(name, "test") or name == "overall"
            odd.append(votes.argmax())
            distance = distance_between(triplet)
            right.append(votes[int(np.argmin([distance(name, i, j) for i, j in PAIRS]))])
        sizes.append(len(triplet.aspects))
        spread.append(len(set(triplet.votes.argmax(1))))
    assert 5 <= np.mean(sizes) <= 7 and np.mean(right) > 0.6
    assert np.bincount(odd, minlength=3).min() > 0.22 * len(odd) and np.mean(spread) > 2.3


def test_a_photograph_offers_only_changes_that_can_be_seen(photo: Photograph) -> None:
    assert set(photo.parts) == set(PHOTO_PARTS)
    gray = photograph("gray", detailed_picture().convert("L"))
    assert "saturation" not in gray.parts and "brightness" in gray.parts
    with pytest.raises(DataError, match="can be changed visibly"):
        photograph("blank", Image.new("RGB", (60, 60), "black"))
    with pytest.raises(DataError, match="strip"):
        photograph("strip", detailed_picture().resize((300, 20)))


def test_a_folder_of_photographs(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    detailed_picture().save(tmp_path / "sub" / "b.png")
    detailed_picture(90, 120).save(tmp_path / "a.jpg")
    assert [p.name for p in load_photographs(tmp_path)] == ["a.jpg", "sub/b.png"]
    data = procedural_data("photographs", 2, folder=str(tmp_path), size=24)
    assert {c.source for c in data.comparisons} <= {"a.jpg", "sub/b.png"}
    (tmp_path / "c.png").write_text("no picture")
    with pytest.raises(DataError, match=r"c\.png does not open"):
        load_photographs(tmp_path)
    with pytest.raises(DataError, match="none is no folder"):
        load_photographs(tmp_path / "none")


def test_the_shipped_photographs() -> None:
    pytest.importorskip("skimage", reason="needs the extra data: pip install 'tpips-reward[data]'")
    photos = shipped_photographs()
    assert len(photos) == 4 and all(len(p.parts) >= 7 for p in photos)
    assert sample_photo_triplet(np.random.default_rng(0), photos, size=48).images[2].shape[2] == 3


def test_two_candidates_are_judged_by_the_same_voters() -> None:
    # candidate 0 is far nearer; with many voters the shares are the choice model's
    votes = Voters(count=4000, lapse=0.0).vote_two_afc(np.array([0.5, 2.5]), np.random.default_rng(0))
    assert votes is not None and votes.sum() == pytest.approx(1)
    assert votes[0] == pytest.approx(1 / (1 + np.exp(-2.2)), abs=0.02)
    # equally near: nobody can tell, however far both are
    assert Voters().vote_two_afc(np.array([3.0, 3.0]), np.random.default_rng(0)) is None
    generator = np.random.default_rng(1)
    some = [Voters(count=4).vote_two_afc(np.array([1.0, 2.0]), generator) for _ in range(200)]
    assert all(v is None or v[0] != v[1] for v in some) and any(v is None for v in some)  # ties are gone


def test_two_afc_sets_follow_the_distances() -> None:
    right = []
    for index in range(30):
        rng = np.random.default_rng(index)
        triplet = sample_triplet(rng, size=16)
        made = two_afc(triplet, Voters(), rng, f"t{index}")
        if made is None:
            continue
        assert made.task == "two_afc" and made.votes.shape == (len(made.aspects), 2) and len(made.aspects) >= 2
        distance = distance_between(triplet)
        for name, votes in zip(made.names, made.votes, strict=True):
            near = [distance(name, i, j) for i, j in CHOICE_PAIRS["two_afc"]]
            right.append(votes[int(np.argmin(near))])
    assert len(right) > 60 and np.mean(right) > 0.75


def test_sets_are_exact_and_their_streams_differ(photo: Photograph, tmp_path: Path) -> None:
    photo.image.save(tmp_path / "p.png")
    folders = {kind: str(tmp_path) if kind.startswith("photographs") else None for kind in KINDS}
    for kind in KINDS:
        one, two = (procedural_data(kind, 2, folder=folders[kind], size=16) for _ in range(2))
        for a, b in zip(one.comparisons, two.comparisons, strict=True):
            assert a.aspects == b.aspects and np.array_equal(a.votes, b.votes)
            assert all(x.same_as(y) for x, y in zip(a.images, b.images, strict=True))
        assert one.task == ("two_afc" if kind.endswith("2afc") else "odd_one_out")
        other = procedural_data(kind, 2, seed=1, folder=folders[kind], size=16)
        assert not other.comparisons[0].images[0].same_as(one.comparisons[0].images[0])
    scenes = procedural_data("procedural", 3, size=16).comparisons
    for comparison, triplet in zip(scenes, held_out_triplets(3, size=16), strict=True):
        assert comparison.aspects == triplet.wordings and comparison.names == triplet.aspects


def test_bad_requests() -> None:
    with pytest.raises(DataError, match="no procedural set 'scenes'"):
        procedural_data("scenes", 1)  # type: ignore[arg-type]
    with pytest.raises(TPIPSError, match="at least one"):
        procedural_data("procedural", 0)


def test_sampled_changes_can_all_be_applied() -> None:
    rng = np.random.default_rng(0)
    assert all(isinstance(sample_change(rng), Change) for _ in range(200))
