"""The metric's interface: shapes, symmetry, sharing, gradients, bad calls."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
import torch
from PIL import Image

from tpips_reward.checkpoints import load_metric
from tpips_reward.dtypes import parse_dtype
from tpips_reward.errors import NotFinite, TPIPSError
from tpips_reward.images import distinct_images
from tpips_reward.metric import Metric

ASPECTS = ["lighting", "camera angle", None]


@pytest.fixture
def encoded(metric, monkeypatch) -> list[int]:
    """How many images each vision pass got."""
    counts: list[int] = []
    encode = metric.backbone.encode_images
    monkeypatch.setattr(metric.backbone, "encode_images", lambda images: counts.append(len(images)) or encode(images))
    return counts


def test_shapes(metric, crops):
    first, second = crops[:3], crops[1:]
    assert metric.similarity(first, second).shape == (3,)
    assert metric.similarity(first, second, "lighting").shape == (3,)
    assert metric.similarity(first, second, ["lighting"]).shape == (3, 1)
    assert metric.similarity(first, second, ASPECTS).shape == (3, 3)
    assert metric.similarity(first[0], second[0]).shape == (1,)
    assert metric.similarity(first[0], second, ASPECTS).shape == (3, 3)
    assert metric.embed(first, "lighting").shape == (3, 64)
    assert metric.embed(first[0], ASPECTS).shape == (1, 3, 64)


def test_one_aspect_is_its_column_of_a_list(metric, crops):
    table = metric.similarity(crops[:2], crops[2:], ASPECTS)
    for column, aspect in enumerate(ASPECTS):
        torch.testing.assert_close(metric.similarity(crops[:2], crops[2:], aspect), table[:, column], atol=1e-5, rtol=0)


def test_similarity_is_symmetric_and_one_for_equal_images(metric, crops, photos):
    there = metric.similarity(crops[:2], crops[2:], ASPECTS)
    torch.testing.assert_close(metric.similarity(crops[2:], crops[:2], ASPECTS), there, atol=1e-6, rtol=0)
    assert (there < 0.999).all()
    twice = metric.similarity(crops, [crop.clone() for crop in crops], ASPECTS)
    torch.testing.assert_close(twice, torch.ones_like(twice), atol=1e-6, rtol=0)
    assert metric.similarity(photos["cat_0"], np.asarray(photos["cat_0"])).item() == pytest.approx(1, abs=1e-6)


def test_distance_and_range(metric, crops):
    similarity = metric.similarity(crops[0], crops[1:], ASPECTS)
    torch.testing.assert_close(metric.distance(crops[0], crops[1:], ASPECTS), 1 - similarity)
    assert metric.range == (-1.0, 1.0)
    assert similarity.dtype == torch.float32


def test_a_distance_is_never_below_zero(metric, crops, monkeypatch):
    scores = torch.tensor([1.0000002, 1.0, 0.25, -1.0])
    monkeypatch.setattr(metric, "similarity", lambda *_, **__: scores)
    assert torch.equal(metric.distance(crops, crops), torch.tensor([0.0, 0.0, 0.75, 2.0]))


def test_dot_products_of_embeddings_are_similarities(metric, crops):
    vectors = metric.embed(crops, ASPECTS)
    torch.testing.assert_close(
        (vectors[0] * vectors[1:]).sum(-1), metric.similarity(crops[0], crops[1:], ASPECTS), atol=1e-5, rtol=0
    )


def test_pairs_with_aspects_of_their_own(metric, crops):
    pairs = [(0, 0, "lighting"), (1, 0, None), (1, 1, "camera angle"), (0, 1, "lighting"), (0, 0, " lighting ")]
    scores = metric.similarity_pairs(crops[:2], crops[2:], pairs)
    for score, (left, right, aspect) in zip(scores, pairs, strict=True):
        assert score.item() == pytest.approx(metric.similarity(crops[left], crops[2 + right], aspect).item(), abs=1e-5)
    assert metric.similarity_pairs(crops, crops, []).shape == (0,)


def test_unused_images_are_not_encoded_and_used_ones_once(metric, crops, encoded):
    metric.similarity_pairs(crops, crops[0], [(1, 0, name) for name in ASPECTS] + [(2, 0, "shape")])
    assert sum(encoded) == 3


def test_equal_images_are_encoded_once(metric, photos, encoded):
    photo = photos["cat_0"]
    metric.similarity([photo, photo.copy(), np.asarray(photo)], [photos["coffee_0"]] * 3, ASPECTS)
    assert sum(encoded) == 2


def test_distinct_images_keeps_different_graphs_apart():
    a = torch.rand(3, 4, 4)
    leaf = a.clone().requires_grad_()
    unique, position = distinct_images([a, a.clone(), leaf, leaf, leaf * 1, a + 1e-7])
    assert position[:2] == [0, 0] and position[2] == position[3] == 1 and position[4] == 2
    assert len(unique) == 4


def test_no_graph_unless_an_image_asks_for_it(metric, crops):
    leaf = crops[0].clone().requires_grad_()
    assert not metric.similarity(crops[0], crops[1]).requires_grad
    assert metric.similarity(leaf, crops[1]).requires_grad
    assert metric.similarity(crops[1], leaf[None]).requires_grad
    assert not metric.similarity(leaf, crops[1], differentiable=False).requires_grad
    with torch.no_grad():
        assert not metric.similarity(leaf, crops[1]).requires_grad
    assert not any(parameter.requires_grad for parameter in metric.fusion.parameters())
    metric.similarity(leaf, crops[1]).sum().backward()
    assert leaf.grad.abs().max() > 0
    assert all(parameter.grad is None for parameter in metric.fusion.parameters())


def test_gradients_through_a_vae_like_range(metric, crops):
    leaf = (crops[0] * 2 - 1).requires_grad_()
    metric.similarity(leaf, crops[1] * 2 - 1, value_range=(-1, 1)).sum().backward()
    direct = crops[0].clone().requires_grad_()
    metric.similarity(direct, crops[1]).sum().backward()
    torch.testing.assert_close(leaf.grad * 2, direct.grad, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_finite_at_identical_images(metric, parity, crops, dtype):
    chosen = metric if dtype == "float32" else load_metric(parity / "embedding", device="cpu", dtype=dtype)
    for other in (crops[0], crops[0].clone().requires_grad_()):
        leaf = crops[0].clone().requires_grad_()
        chosen.distance(leaf, other, ASPECTS).sum().backward()
        assert leaf.grad.isfinite().all()
    for flat in (torch.zeros(3, 64, 64), torch.ones(3, 64, 64), torch.full((3, 64, 64), 0.5)):
        leaf = flat.requires_grad_()
        chosen.similarity(leaf, crops[1]).sum().backward()
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["pil", "array", "no_grad", "plain"])
def test_asking_for_a_gradient_that_cannot_flow_is_an_error(metric, crops, photos, kind):
    image = {
        "pil": photos["cat_0"], "array": np.asarray(photos["cat_0"]), "plain": crops[0],
        "no_grad": crops[0].clone().requires_grad_(),
    }[kind]  # fmt: skip
    with torch.set_grad_enabled(kind != "no_grad"), pytest.raises(TPIPSError, match="no gradient can flow"):
        metric.similarity(image, crops[1], differentiable=True)


def test_pil_and_tensor_routes_agree(metric, photos):
    """Both are computed in float; the bound that users can rely on is float rounding."""
    photo = photos["coffee_2"]
    tensor = torch.from_numpy(np.array(photo)).permute(2, 0, 1).float() / 255
    torch.testing.assert_close(metric.embed(photo), metric.embed(tensor), atol=1e-6, rtol=0)


def test_small_images(metric, crops):
    for size in ((1, 1), (27, 5), (3, 100)):
        assert metric.similarity(torch.rand(3, *size), crops[0], ASPECTS).isfinite().all()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"aspects": []}, "empty list; give at least one aspect"),
        ({"aspects": 3}, "aspects must be a string"),
        ({"aspects": ["lighting", 3]}, "must be a string"),
        ({"b": torch.full((3, 8, 8), -1.0)}, "^b has values .* pass value_range"),
        ({"b": torch.full((3, 8, 8), float("nan"))}, "^b holds NaN"),
        ({"b": []}, "b holds no image"),
        ({"a": torch.rand(2, 3, 8, 8), "b": torch.rand(3, 3, 8, 8)}, "a holds 2 images and b 3"),
    ],
)
def test_bad_calls(metric, crops, arguments, message):
    with pytest.raises(TPIPSError, match=message):
        metric.similarity(**{"a": crops[0], "b": crops[1], **arguments})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_has_its_place_among_the_asked(metric, crops, monkeypatch, number):
    score_pairs, embed = metric.fusion.score_pairs, metric.fusion.embed

    def spoiled(values, good):
        """The same rows, which from `good` on are no numbers."""
        values[good:] = number
        return values

    def spoil(good):
        monkeypatch.setattr(metric.fusion, "score_pairs", lambda *given: spoiled(score_pairs(*given), good))

    def check(position, what, call):
        with pytest.raises(NotFinite, match=f"gives no finite number for {what}: ") as caught:
            call()
        assert caught.value.position == position
        again = copy.copy(caught.value)  # as it comes from another process
        assert (type(again), str(again), again.position) == (NotFinite, str(caught.value), position)

    spoil(3)
    check(3, r"a\[1\] and b\[1\] in 'y'", lambda: metric.similarity(crops[:2], crops[2:], ["x", "y"]))
    spoil(1)
    pairs = [(0, 1, "x"), (2, 3, "y")]
    check(1, r"images\[2\] and references\[3\] in 'y'", lambda: metric.similarity_pairs(crops, crops, pairs))
    spoil(4)
    triplets = [(0, 1, 2, "x"), (1, 2, 3, "y"), (0, 1, 3, "z")]
    check(1, r"images\[1\] and images\[2\] and images\[3\] in 'y'", lambda: metric.odd_one_out(crops, triplets))
    monkeypatch.setattr(metric.fusion, "embed", lambda *given: [spoiled(rows, 1 + (k == 0)) for k, rows in enumerate(embed(*given))])
    check(3, r"images\[1\] in 'y'", lambda: metric.embed(crops[:2], ["x", "y"]))


@pytest.mark.parametrize("pair, message", [((4, 0, "x"), r"images\[4\]"), ((0, -1, "x"), r"references\[-1\]")])
def test_pairs_out_of_range(metric, crops, pair, message):
    with pytest.raises(TPIPSError, match=message):
        metric.similarity_pairs(crops, crops, [(0, 0, "x"), pair])


@pytest.mark.parametrize(
    "pairs, message",
    [
        ([(0, 0)], r"pairs\[0\] is \(0, 0\); give \(index, index, aspect\)"),
        ([(0, 0, "x"), 3], r"pairs\[1\] is 3; give"),
        ([(0, 1.0, "x")], r"pairs\[0\] has the index 1.0; give a whole number"),
        ([("0", 1, "x")], r"pairs\[0\] has the index '0'"),
        ([(torch.tensor([0, 1]), 1, "x")], r"pairs\[0\] has the index tensor"),
        (None, "pairs must be a list of .index, index, aspect., got NoneType"),
        (np.zeros((2, 3)), "pairs must be a list of .*, got ndarray"),
    ],
)
def test_pairs_and_triplets_of_another_form(metric, crops, pairs, message):
    with pytest.raises(TPIPSError, match=message):
        metric.similarity_pairs(crops, crops, pairs)
    triplets = [(*entry[:1], *entry) if isinstance(entry, tuple) else entry for entry in pairs] if isinstance(pairs, list) else pairs
    with pytest.raises(TPIPSError, match=r"^triplets(\[.\] (is|has the index)| must be a list of \(index, index, index, aspect\))"):
        metric.odd_one_out(crops, triplets)


def test_indices_of_numpy_and_torch_are_whole_numbers(metric, crops):
    given = metric.similarity_pairs(crops, crops, [(np.int64(0), torch.tensor(1), "x")])
    assert torch.equal(given, metric.similarity_pairs(crops, crops, [(0, 1, "x")]))


def test_to_moves_everything_and_back(parity, crops):
    metric = load_metric(parity / "embedding", device="cpu")
    before = metric.similarity(crops[0], crops[1], ASPECTS)
    assert metric.to(dtype=torch.bfloat16) is metric and metric.dtype == torch.bfloat16
    assert metric.similarity(crops[0], crops[1], ASPECTS).dtype == torch.float32
    metric.to("meta")
    left = [*metric.fusion.named_parameters(), *metric.fusion.named_buffers()]
    assert {value.device.type for _, value in left} == {"meta"}
    wide = load_metric(parity / "embedding", device="cpu", dtype="bfloat16").to(dtype="float32")
    torch.testing.assert_close(wide.similarity(crops[0], crops[1], ASPECTS), before, atol=0.02, rtol=0)


@pytest.mark.parametrize("dtype", ["float16", torch.float16, "half"])
def test_float16_is_refused_with_a_reason(metric, dtype):
    with pytest.raises(TPIPSError, match="float16 is refused.*65504"):
        metric.to(dtype=dtype)


def test_a_device_without_memory_is_told_from_one_that_is_not_there(parity, monkeypatch):
    metric = load_metric(parity / "embedding", device="cpu")

    def fail(error):
        def to(**_):
            raise error

        monkeypatch.setattr(metric.fusion, "to", to)

    fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"))
    with pytest.raises(TPIPSError, match=r"'cuda:0' has not enough free memory for the metric \(0\.0 GiB\)"):
        metric.to("cuda:0")
    fail(RuntimeError("Torch not compiled with CUDA"))
    with pytest.raises(TPIPSError, match="The device 'cuda:0' cannot be used for the metric"):
        metric.to("cuda:0")


def test_a_device_that_is_no_name(metric):
    for call in (lambda: load_metric("builtin:late", device=3.5), lambda: metric.to(3.5)):
        with pytest.raises(TPIPSError, match="The device 3.5"):
            call()


def test_dtypes():
    assert parse_dtype("bf16") == parse_dtype(torch.bfloat16) == parse_dtype("torch.bfloat16") == torch.bfloat16
    with pytest.raises(TPIPSError, match="int8.*unknown"):
        parse_dtype("int8")


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")])
def test_change_scale_is_positive(metric, value):
    with pytest.raises(TPIPSError, match="change_scale"):
        Metric(metric.fusion, change_scale=value)


def test_a_hundred_calls_leave_nothing_behind(metric):
    image, other = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    for _ in range(3):
        metric.similarity(image, other, ASPECTS)
    before = tensors()
    for _ in range(100):
        metric.similarity(image, other, ASPECTS)
    assert tensors() <= before
