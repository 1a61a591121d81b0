"""Images that are opened when they are needed: files on the disk, or entries of a table (see `tables`)."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from tpips_reward.errors import TPIPSError
from tpips_reward.images import check_size, to_tensors

#: What a folder of results may hold for a key, without regard to case.
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")


class ImageRef(Protocol):
    """Where an image is. `label` names it in messages and tells two of them apart."""

    @property
    def label(self) -> str: ...

    def read(self) -> bytes:
        """The encoded file; raises TPIPSError where that cannot be had."""
        ...


@dataclass(frozen=True)
class ImageFile:
    """An image file."""

    path: Path

    @property
    def label(self) -> str:
        return str(self.path)

    def read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            raise TPIPSError(f"{self.path} does not exist.") from None
        except OSError as error:
            raise TPIPSError(f"{self.path} cannot be read: {error.strerror or error}.") from error


def digest(content: bytes) -> str:
    """What tells two encoded images apart: 32 hexadecimal digits of SHA-256."""
    return hashlib.sha256(content).hexdigest()[:32]


def image_size(ref: ImageRef) -> tuple[int, int]:
    """(width, height) as it will be seen, turned upright, from the file's head alone.

    Raises:
        TPIPSError: it does not open, or has a size that no metric takes.
    """
    source = ref.path if isinstance(ref, ImageFile) else io.BytesIO(ref.read())
    with _sentences(ref.label), _opened(source) as image:
        turned = image.getexif().get(0x0112, 1) >= 5  # EXIF orientation: 5 to 8 are turned by a quarter
        width, height = (image.height, image.width) if turned else image.size
    check_size(height, width, ref.label)
    return width, height


def decode(content: bytes, label: str) -> Tensor:
    """An encoded image -> (3, H, W) float32 in [0, 1], upright, transparency on white.

    Raises:
        TPIPSError: truncated, no image, or a size that no metric takes.
    """
    with _sentences(label):
        image = _opened(io.BytesIO(content))
        image.load()
        return to_tensors(ImageOps.exif_transpose(image), name=label)[0]


def resized(image: Tensor, size: tuple[int, int]) -> Tensor:
    """(3, H, W) in [0, 1] -> (3, height, width): bicubic, antialiased, clamped; itself where the size is the same."""
    if image.shape[1:] == size:
        return image
    larger = torch.nn.functional.interpolate(image[None], size=size, mode="bicubic", antialias=True)
    return larger[0].clamp(0, 1)


def _opened(source: Any) -> Image.Image:
    """The image, whose pixels are not read yet; one that Pillow only warns of is refused."""
    image = Image.open(source)
    if Image.MAX_IMAGE_PIXELS is not None and image.width * image.height > Image.MAX_IMAGE_PIXELS:
        image.close()
        raise Image.DecompressionBombError
    return image


class _sentences:
    """Turns Pillow's many ways of failing into one sentence that names the file. No `warnings` filter: those are not for
    threads."""

    def __init__(self, label: str) -> None:
        self.label = label

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, TPIPSError):
            return
        if isinstance(error, FileNotFoundError):
            raise TPIPSError(f"{self.label} does not exist.") from None
        if isinstance(error, UnidentifiedImageError):
            raise TPIPSError(f"{self.label} is no image that Pillow can read.") from None
        if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):  # `-W error` raises the warning
            # Pillow refuses before it says how large the image is
            raise TPIPSError(
                f"{self.label} has more pixels than the {Image.MAX_IMAGE_PIXELS:,} that are read; make it smaller."
            ) from None
        if isinstance(error, Exception):  # EXIF alone has struct.error, TypeError, AttributeError ...
            raise TPIPSError(f"{self.label} cannot be read: {error}.") from error
