"""Encoded images of untrusted requests -> PIL images. Their size is known from the head before any pixel is decoded."""

from __future__ import annotations

import base64
import binascii
import io
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from PIL import Image, ImageOps, UnidentifiedImageError

from tpips_reward.serving.errors import RequestError, bad_field, too_large

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Few formats, so that few decoders meet strangers' bytes.
FORMATS = ("PNG", "JPEG", "WEBP")
#: A drive, or a root, with which no base64 of an image begins but a JPEG's; and how files of images end. For short texts.
_PATH = re.compile(r"[a-z]:[\\/]|/(?!9j/)|.*\.(png|jpe?g|webp|gif|bmp|tiff?|heic|avif)\s*$", re.IGNORECASE | re.DOTALL)
_LONGEST_PATH = 4096


def from_base64(text: object, label: str) -> bytes:
    """The bytes of an image in base64, with or without a `data:image/...;base64,` head.

    Raises:
        RequestError: 422 for something that is no text, or a path or an address; 400 for wrong base64.
    """
    if not isinstance(text, str):
        raise bad_field(f"{label} is a {type(text).__name__}; send the image as base64 text.")
    if text.startswith("data:"):
        _, comma, text = text.partition(";base64,")
        if not comma:
            raise bad_field(f"{label} is a data: address without ';base64,'; send base64.")
    elif "://" in text[:32]:
        raise bad_field(f"{label} is an address; this server opens none: send the image itself as base64.")
    elif len(text) <= _LONGEST_PATH and _PATH.match(text):
        raise bad_field(f"{label} looks like a path; this server opens none: send the image itself as base64.")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(400, "bad_base64", f"{label} is not base64 ({error}).") from None


def image_pixels(content: bytes, label: str, limit: int) -> int:
    """Width times height of an encoded image, from its head alone.

    Raises:
        RequestError: 415 for anything but a PNG, JPEG or WebP image; 413 for more than `limit` pixels.
    """
    with _refusals(label, limit), Image.open(io.BytesIO(content), formats=FORMATS) as image:
        pixels = image.width * image.height
    if pixels > limit:
        raise _too_many(label, limit, f"{image.width}x{image.height} = ")
    return pixels


def decode_image(content: bytes, label: str, limit: int) -> Image.Image:
    """The image upright, in the mode that it has; the first frame of an animation.

    Raises:
        RequestError: as `image_pixels`; 415 for a truncated or damaged file.
    """
    image_pixels(content, label, limit)
    with _refusals(label, limit):
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        image.load()
        upright = ImageOps.exif_transpose(image).copy()
        # of the file's notes only transparency says something about pixels
        upright.info = {key: value for key, value in upright.info.items() if key == "transparency"}
        return upright


def _too_many(label: str, limit: int, size: str = "") -> RequestError:
    return too_large(f"{label} has {size}more than {limit} pixels; make it smaller.")


@contextmanager
def _refusals(label: str, limit: int) -> Iterator[None]:
    """Pillow's many ways of failing as one sentence. No `warnings` filter: those are not for threads."""
    try:
        yield
    except RequestError:
        raise
    except Image.DecompressionBombError:
        raise _too_many(label, limit) from None
    except UnidentifiedImageError:
        raise RequestError(415, "not_an_image", f"{label} is no {', '.join(FORMATS)} image.") from None
    except Exception as error:  # noqa: BLE001 - EXIF alone has struct.error, TypeError, AttributeError ...
        raise RequestError(415, "not_an_image", f"{label} cannot be decoded: {error}.") from None
