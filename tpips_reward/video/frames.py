"""The frames of a video file, or of a folder of images, one after the other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.image_files import IMAGE_SUFFIXES, ImageFile, decode
from tpips_reward.images import to_tensors


@dataclass(frozen=True)
class Frame:
    """number: from 0, counting all frames; seconds: since the first; pixels: (3, H, W) in [0, 1]."""

    number: int
    seconds: float
    pixels: Tensor


def read_frames(source: Path, every: int = 1, fps: float = 24.0) -> Iterator[Frame]:
    """The frames 0, every, 2 * every ... of a video file or a folder; only one is held at a time.

    Args:
        source: a folder, whose images are ordered by the numbers in their names; or a file that PyAV reads.
        fps: of a folder; a file has its own times.

    Raises:
        TPIPSError: nothing to read, a damaged file, numbers that are not positive, PyAV is missing.
    """
    if every < 1 or not 0 < fps < float("inf"):
        raise TPIPSError(f"every={every} and fps={fps:g} must be positive.")
    if source.is_dir():
        yield from _folder(source, every, fps)
    elif source.is_file():
        yield from _file(source, every)
    else:
        raise TPIPSError(f"{source} does not exist.")


def frame_at(source: Path, number: int, fps: float = 24.0) -> Frame:
    """One frame by its number.

    Raises:
        TPIPSError: there is none with this number; whatever reading raises.
    """
    if number < 0:
        raise TPIPSError(f"--reference is {number}; frames count from 0.")
    # in steps of the number itself: of a folder two files are opened, of a video all are decoded anyway
    last = None
    for last in read_frames(source, max(number, 1), fps):
        if last.number == number:
            return last
    seen = "no frames" if last is None else f"fewer than {number + 1} frames"
    raise TPIPSError(f"--reference is {number}, and {source} has {seen}; give a smaller number.")


def _folder(folder: Path, every: int, fps: float) -> Iterator[Frame]:
    # a link to nothing stays: left out, it would move all later frames; it is an error where it is read
    paths = [path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and not path.is_dir()]
    if not paths:
        raise TPIPSError(f"{folder} has no frames ({', '.join(IMAGE_SUFFIXES)}).")
    paths.sort(key=lambda path: _natural(path.name))
    for number in range(0, len(paths), every):
        yield Frame(number, number / fps, decode(ImageFile(paths[number]).read(), str(paths[number])))


def _natural(name: str) -> list[tuple[int, Any]]:
    """frame2 before frame10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def _file(path: Path, every: int) -> Iterator[Frame]:
    try:
        import av
    except ModuleNotFoundError:
        raise TPIPSError("A video file needs PyAV, which is not installed; pip install 'tpips-reward[video]', or give "
                         "a folder of frames.") from None  # fmt: skip
    count = 0
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise TPIPSError(f"{path} has no video.")
            first = None
            for count, frame in enumerate(container.decode(video=0), 1):
                time = frame.time if frame.time is not None else 0.0
                first = time if first is None else first
                if (count - 1) % every == 0:
                    yield Frame(
                        count - 1, time - first, to_tensors([frame.to_image()], name=f"{path}, frame {count - 1}")[0]
                    )
    except (av.error.FFmpegError, OSError, ValueError) as error:
        if isinstance(error, TPIPSError):
            raise
        raise TPIPSError(f"{path} cannot be read as a video after {count} frames: {error}.") from None
    if not count:
        raise TPIPSError(f"{path} has no frames.")
