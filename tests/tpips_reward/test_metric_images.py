"""Every accepted image comes out as the same pixels, and every bad one as an error that says what to do."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from tpips_reward import images as images_module
from tpips_reward.errors import TPIPSError
from tpips_reward.images import to_tensors


@pytest.fixture(scope="module")
def array() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def expected(array) -> torch.Tensor:
    return torch.from_numpy(array).permute(2, 0, 1).float() / 255


def test_all_kinds_give_the_same_pixels(array, expected):
    floats = array.astype(np.float32) / 255
    kinds = [
        Image.fromarray(array),
        array,
        array.transpose(2, 0, 1),
        floats,
        floats.astype(np.float64),
        array.astype(np.uint16) * 257,
        torch.from_numpy(array).permute(2, 0, 1),
        expected,
        expected.double(),
    ]
    for kind, pixels in zip(kinds, to_tensors(kinds), strict=True):
        torch.testing.assert_close(pixels.float(), expected, atol=1e-6, rtol=0, msg=str(type(kind)))


def test_batches_and_lists(array, expected):
    for batch in (torch.stack([expected] * 2), np.stack([array] * 2), [array, expected], (array, array)):
        found = to_tensors(batch)
        assert len(found) == 2 and all(torch.allclose(pixels, expected, atol=1e-6) for pixels in found)
    assert [tuple(p.shape) for p in to_tensors([array, array[:7, :9]])] == [(3, 20, 30), (3, 7, 9)]


def test_value_ranges(expected):
    torch.testing.assert_close(to_tensors(expected * 2 - 1, value_range=(-1, 1))[0], expected)
    torch.testing.assert_close(to_tensors(expected * 255, value_range=(0, 255))[0], expected)


def test_half_precision_tensors_become_float32(expected):
    for dtype in (torch.bfloat16, torch.float16):
        assert to_tensors(expected.to(dtype))[0].dtype == torch.float32


def test_the_same_object_is_converted_once(array):
    first, second, third = to_tensors([array, array, array.copy()])
    assert first is second and third is not first


def test_float_tensors_keep_their_graph(expected):
    leaf = expected.clone().requires_grad_()
    to_tensors(leaf[None] * 2 - 1, value_range=(-1, 1))[0].sum().backward()
    torch.testing.assert_close(leaf.grad, torch.ones_like(leaf))


@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "LAB", "RGBA", "LA", "RGBX", "I", "F", "PA", "La", "RGBa"]
)
def test_every_pil_mode(mode):
    steps = {"LAB": ["RGB", "LAB"], "PA": ["P", "PA"], "La": ["LA", "La"], "RGBa": ["RGBA", "RGBa"]}.get(mode, [mode])
    image = Image.new("RGB", (12, 8), (255, 255, 255))
    for step in steps:
        if step == "LAB":
            from PIL import ImageCms

            profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
            image = ImageCms.profileToProfile(image, *profiles, outputMode="LAB")
        else:
            image = image.convert(step)
    if mode == "I":
        image = image.point(lambda value: value * 257)
    if mode == "F":
        image = Image.fromarray(np.ones((8, 12), dtype=np.float32))
    pixels = to_tensors(image)[0]
    assert pixels.shape == (3, 8, 12)
    torch.testing.assert_close(pixels, torch.ones_like(pixels), atol=0.02, rtol=0)


def test_sixteen_bit_grayscale_keeps_its_levels():
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    pixels = to_tensors(Image.fromarray(ramp))[0]
    torch.testing.assert_close(pixels[0], torch.from_numpy(ramp.astype(np.float32) / 65535))


def test_alpha_is_composited_on_white_or_dropped():
    rgba = np.zeros((4, 4, 4), dtype=np.uint8)
    rgba[..., 0], rgba[..., 3] = 200, 51
    for kind in (Image.fromarray(rgba), rgba, torch.from_numpy(rgba).permute(2, 0, 1)):
        white, dropped = to_tensors(kind)[0], to_tensors(kind, alpha="drop")[0]
        assert white[:, 0, 0].tolist() == pytest.approx([200 / 255 * 0.2 + 0.8, 0.8, 0.8], abs=1e-6)
        assert dropped[:, 0, 0].tolist() == pytest.approx([200 / 255, 0, 0], abs=1e-6)
    palette = Image.fromarray(np.zeros((4, 4), dtype=np.uint8)).convert("P")
    palette.info["transparency"] = 0
    torch.testing.assert_close(to_tensors(palette)[0], torch.ones(3, 4, 4))


def test_gray_is_expanded():
    gray = np.full((5, 6), 51, dtype=np.uint8)
    for kind in (gray, gray[..., None], gray[None], torch.from_numpy(gray), torch.from_numpy(gray)[None]):
        torch.testing.assert_close(to_tensors(kind)[0], torch.full((3, 5, 6), 0.2))


def test_exif_orientation_is_applied(tmp_path):
    array = np.zeros((10, 20, 3), dtype=np.uint8)
    array[:, :5] = 255
    image, exif = Image.fromarray(array), Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it rotated by 90 degrees clockwise
    image.save(tmp_path / "turned.png", exif=exif)
    pixels = to_tensors(Image.open(tmp_path / "turned.png"))[0]
    assert pixels.shape == (3, 20, 10)
    assert pixels[:, :5].min() == 1 and pixels[:, 5:].max() == 0


def test_slightly_outside_is_clamped(expected):
    slightly = expected.clone()
    slightly[0, 0, 0], slightly[0, 0, 1] = 1.0009, -0.0009
    pixels = to_tensors(slightly)[0]
    assert pixels.max() <= 1 and pixels.min() >= 0


@pytest.mark.parametrize(
    "change, remedy",
    [
        (lambda x: x * 2 - 1, r"value_range=\(0, 1\); pass value_range=\(-1, 1\)"),
        (lambda x: x * 255, r"pass value_range=\(0, 255\)"),
        (lambda x: x * 3 - 2, "rescale them"),
        (lambda x: x * 1.02, "outside value_range"),
    ],
)
def test_out_of_range_names_the_range_and_the_remedy(expected, change, remedy):
    with pytest.raises(TPIPSError, match=remedy):
        to_tensors(change(expected))


@pytest.mark.parametrize(
    "low, high, value_range, remedy",
    [
        (0, 1.002, (0, 1), "clamp them"),
        (-0.05, 1, (0, 1), "clamp them"),
        (-1, 1.05, (-1, 1), "clamp them"),
        (0, 258, (0, 255), "clamp them"),
        (0, 3, (0, 1), "rescale them"),
        (-0.5, 1, (0, 1), r"pass value_range=\(-1, 1\)"),
        (-1, 1, (0, 255), r"pass value_range=\(-1, 1\)"),
        (0, 255, (-1, 1), r"pass value_range=\(0, 255\)"),
    ],
)
def test_a_range_is_only_recommended_where_the_values_are_in_it(low, high, value_range, remedy):
    """What lies just outside of a range would be scored at half its contrast, or in black, by another one."""
    with pytest.raises(TPIPSError, match=rf"outside value_range=.*; (they are nearly inside it: )?{remedy}"):
        to_tensors(torch.linspace(low, high, 48).view(3, 4, 4), value_range=value_range)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity(expected, value):
    broken = expected.clone()
    broken[1, 2, 3] = value
    with pytest.raises(TPIPSError, match=r"images\[1\] holds NaN or infinite"):
        to_tensors([expected, broken])


@pytest.mark.parametrize(
    "bad, message",
    [
        ([], "holds no image"),
        (torch.zeros(0, 3, 4, 4), "holds no image"),
        ("photo.png", "open the file first"),
        (["photo.png"], r"images\[0\] is of type str.*open the file"),
        (None, "NoneType"),
        ([3], r"images\[0\] is of type int"),
        (torch.zeros(20, 30, 3), "permute"),
        (torch.zeros(7, 8, 8), "1 to 4 channels"),
        (np.zeros((7, 8, 9)), "1 to 4 channels"),
        (np.zeros(5), "shape"),
        (torch.zeros(1, 1, 3, 4, 4), "shape"),
        ([torch.zeros(1, 3, 4, 4)], r"images\[0\] has shape"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), "dtype"),
        (torch.zeros(3, 4, 4, dtype=torch.complex64), "dtype"),
        (np.array([[["a", "b", "c"]]]), "dtype"),
        (np.zeros((4, 4, 3), dtype=np.longdouble), "dtype"),
        (np.ma.masked_array(np.zeros((4, 4, 3)), mask=True), "images is a masked array; .*filled"),
        (np.ma.masked_array(np.zeros((2, 4, 4, 3)), mask=True), r"images\[0\] is a masked array"),
        (torch.zeros(3, 0, 4), "empty"),
        (torch.zeros(3, 2, 402), "more than 200 times"),
    ],
)
def test_bad_images(bad, message):
    with pytest.raises(TPIPSError, match=message):
        to_tensors(bad)


def test_too_many_pixels(monkeypatch):
    monkeypatch.setattr(images_module, "MAX_PIXELS", 100)
    with pytest.raises(TPIPSError, match="over the limit"):
        to_tensors(Image.new("RGB", (20, 20)))


def test_a_truncated_file_is_an_error(tmp_path, array):
    path = tmp_path / "cut.png"
    Image.fromarray(array).save(path)
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(TPIPSError, match=r"^images cannot be read"):
        to_tensors(Image.open(path))
    with pytest.raises(TPIPSError, match=rf"^images\[0\] cannot be read .*; the file {path} may be truncated"):
        to_tensors([Image.open(path)])


def test_a_damaged_exif_is_an_error(array):
    content = io.BytesIO()
    Image.fromarray(array).save(content, "PNG", exif=b"Exif\0\0II*\0")
    with pytest.raises(TPIPSError, match=r"^images\[0\] cannot be read"):
        to_tensors([Image.open(content)])


@pytest.mark.parametrize("value_range", [(1, 0), (0, 0), (0,), "01x", None, (0, float("inf"))])
def test_bad_value_ranges(expected, value_range):
    with pytest.raises(TPIPSError, match="value_range must be"):
        to_tensors(expected, value_range=value_range)


def test_bad_alpha(expected):
    with pytest.raises(TPIPSError, match="alpha must be"):
        to_tensors(expected, alpha="black")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_pixels_are_named():
    for tensor, word in (
        (torch.rand(3, 8, 8).to_sparse(), "sparse"),
        (torch.empty(3, 8, 8, device="meta"), "meta"),
        (torch.nested.nested_tensor([torch.zeros(4, 4), torch.zeros(3, 4)]), "nested"),
    ):
        with pytest.raises(TPIPSError, match=word):
            to_tensors([tensor])
