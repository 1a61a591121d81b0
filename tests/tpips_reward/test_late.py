"""Late fusion: the packed pass equals separate passes, in numbers and in gradients."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from tpips_reward.backbone import split_by_budget
from tpips_reward.checkpoints import load_metric
from tpips_reward.errors import TPIPSError
from tpips_reward.fusion.image_first import block_mask, mrope_positions, pack
from tpips_reward.preprocess import to_patches

ASPECTS = ["lighting", None, "the color of the subject's left ear", "camera angle"]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def late(metric):
    return metric.fusion


def test_packed_aspects_equal_separate_passes(late, crops):
    with torch.no_grad():
        packed = late.embed(crops, [ASPECTS] * len(crops))
        for image, rows in zip(crops, packed, strict=True):
            separate = torch.cat([late.embed([image], [[aspect]])[0] for aspect in ASPECTS])
            torch.testing.assert_close(rows, separate, atol=TOLERANCE, rtol=0)


def test_equals_transformers_own_causal_forward(late, crops):
    """Positions, mask, deepstack and read-out against the plain model, which sees one prompt without any packing."""
    model = late.backbone.model
    for image in crops:
        patches, (rows, columns) = to_patches([image], late.backbone.settings)[0]
        grid = torch.tensor([[1, rows, columns]])
        ids = list(late.prompts.full("lighting"))
        at = ids.index(model.config.image_token_id)
        ids[at : at + 1] = [model.config.image_token_id] * (rows * columns // 4)
        tokens = torch.tensor([ids])
        with torch.no_grad():
            hidden = model(
                input_ids=tokens,
                pixel_values=patches,
                image_grid_thw=grid,
                mm_token_type_ids=(tokens == model.config.image_token_id).int(),
            ).last_hidden_state[0, -1]
            ours = late.embed([image], [ASPECTS])[0][0]
        torch.testing.assert_close(ours, torch.nn.functional.normalize(hidden, dim=-1), atol=TOLERANCE, rtol=0)


def test_deepstack_features_reach_the_language_tower(late, crops):
    features = late.backbone.encode_images(crops[:1])
    assert len(features[0].deepstack) == len(late.backbone.config.vision_config.deepstack_visual_indexes)
    suffixes = [[late.prompts.suffix("lighting")]]
    with torch.no_grad():
        full = late.embed_features(features, suffixes)[0]
        features[0].deepstack[0].zero_()
        assert (late.embed_features(features, suffixes)[0] - full).abs().max() > 1e-3


def test_a_batch_of_mixed_sizes_equals_single_calls(late, crops):
    ragged = [["lighting"], ASPECTS, [None, "a"], ["b" * 300]]
    with torch.no_grad():
        together = late.embed(crops, ragged)
        for image, names, rows in zip(crops, ragged, together, strict=True):
            torch.testing.assert_close(rows, late.embed([image], [names])[0], atol=TOLERANCE, rtol=0)


def test_small_token_budgets_change_nothing(metric, crops, monkeypatch):
    late = metric.fusion
    with torch.no_grad():
        whole = late.embed(crops, [ASPECTS] * len(crops))
        monkeypatch.setattr(late, "token_budget", 64)
        monkeypatch.setattr(late.backbone, "patch_budget", 16)
        monkeypatch.setattr("tpips_reward.fusion.image_first.MAX_SUFFIX_TOKENS", 12)
        for rows, expected in zip(late.embed(crops, [ASPECTS] * len(crops)), whole, strict=True):
            torch.testing.assert_close(rows, expected, atol=TOLERANCE, rtol=0)


def test_an_image_goes_through_the_vision_tower_once(metric, crops, monkeypatch):
    seen = []
    encode = metric.backbone.encode_images
    monkeypatch.setattr(metric.backbone, "encode_images", lambda images: seen.append(len(images)) or encode(images))
    metric.similarity(crops, crops[0], ["lighting", "camera angle"])
    assert sum(seen) == len(crops)


def test_vectors_are_unit_float32(late, crops):
    rows = late.embed(crops[:1], [ASPECTS])[0]
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(len(ASPECTS)))


def test_packed_gradients_equal_those_of_separate_passes(metric, crops):
    late = copy.deepcopy(metric.fusion).requires_grad_(True)
    image = crops[1].clone().requires_grad_()
    direction = torch.randn(len(ASPECTS), late.backbone.hidden_size)

    def gradients(rows):
        names, weights = zip(*late.named_parameters(), strict=True)
        found = torch.autograd.grad((rows * direction).sum(), [image, *weights], allow_unused=True)
        return dict(zip(["image", *names], found, strict=True))

    packed = gradients(late.embed([image], [ASPECTS])[0])
    separate = gradients(torch.cat([late.embed([image], [[aspect]])[0] for aspect in ASPECTS]))
    assert all(value is not None for value in packed.values())
    for name, value in packed.items():
        scale = separate[name].abs().max().clamp(min=1e-6)
        torch.testing.assert_close(value / scale, separate[name] / scale, atol=1e-4, rtol=0, msg=name)


def test_pixel_gradient_equals_finite_differences_in_float64(parity, crops):
    double = load_metric(parity / "embedding", device="cpu", dtype="float64")
    # away from 0 and 1, so that no step leaves the range
    image, other = crops[0][:, :60, :70].double() * 0.8 + 0.1, crops[2].double()

    def score(pixels):
        return double.similarity(pixels, other, "lighting", differentiable=pixels.requires_grad)[0]

    pixels = image.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(score(pixels), pixels)
    assert gradient.dtype == torch.float64
    smooth = torch.nn.functional.interpolate(torch.randn(1, 3, 6, 7).double(), size=image.shape[1:], mode="bicubic")[0]
    for direction in (gradient / gradient.norm(), smooth / smooth.norm()):
        # norms inside transformers' layers are float32, which sets the step: above rounding, below curvature
        step = 2e-2
        numeric = (score(image + direction * step) - score(image - direction * step)) / (2 * step)
        assert float(numeric) == pytest.approx(float((gradient * direction).sum()), rel=2e-3)


def test_positions_are_those_of_transformers(late):
    model, image_id = late.backbone.model, late.backbone.config.image_token_id
    for rows, columns in ((2, 3), (5, 1), (4, 4)):
        ids = pack(late.prompts.prefix, [late.prompts.suffix("lighting")], image_id, (rows, columns)).ids
        tokens = torch.tensor(ids)[None]
        expected, _ = model.get_rope_index(
            tokens, (tokens == image_id).int(), torch.tensor([[1, 2 * rows, 2 * columns]])
        )
        assert (expected[:, 0].numpy() == mrope_positions(list(ids), image_id, (rows, columns))).all()


def test_every_suffix_goes_on_right_after_the_prefix():
    packed = pack([1, 5, 4], [(7, 8), (9, 10, 11)], 5, (1, 2))
    assert packed.ids.tolist() == [1, 5, 5, 4, 7, 8, 9, 10, 11]
    assert packed.segments.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert packed.readouts.tolist() == [5, 8]
    assert packed.positions[0].tolist() == [0, 1, 1, 3, 4, 5, 4, 5, 6]
    assert packed.positions[2].tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6]


def test_block_mask():
    mask = block_mask(torch.tensor([[0, 0, 1, 2, 2, -1]]))[0, 0].int()
    assert mask.tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]


def test_budget_groups():
    assert split_by_budget([3, 3, 3, 9, 1], 6) == [[0, 1], [2], [3], [4]]
    assert split_by_budget([1, 2, 4], 6, padded=True) == [[0, 1], [2]]
    assert split_by_budget([4, 5, 8, 9, 40, 41], 1000, padded=True) == [[0, 1, 2], [3], [4, 5]]
    lengths = np.random.default_rng(0).integers(1, 50, 100).tolist()
    groups = split_by_budget(lengths, 64, padded=True)
    assert [index for group in groups for index in group] == list(range(100))
    assert all(len(group) == 1 or max(lengths[k] for k in group) * len(group) <= 64 for group in groups)


def test_converting_to_bfloat16_keeps_rotary_frequencies_exact(parity):
    metric = load_metric(parity / "embedding", device="cpu")
    before = {name: buffer.clone() for name, buffer in metric.fusion.named_buffers() if "inv_freq" in name}
    metric.to(dtype="bfloat16")
    assert metric.dtype == torch.bfloat16 and before
    for name, buffer in metric.fusion.named_buffers():
        if name in before:
            assert buffer.dtype == torch.float32 and torch.equal(buffer, before[name])


def test_bad_calls(late, crops):
    with pytest.raises(TPIPSError, match="1 images and 2 lists"):
        late.embed(crops[:1], [["a"], ["b"]])
    with pytest.raises(TPIPSError, match="Image 1 has an empty list"):
        late.embed(crops[:2], [["a"], []])
