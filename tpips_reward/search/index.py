"""An index: unit vectors of many images in several aspects, on the disk, and exact nearest neighbours by FAISS.

    index.json       what is indexed, and by which metric
    vectors-K.npy    (N, D) float32 of the K-th aspect
    probe.npy        (D,) of an image that everybody has, to tell whether a metric is the same

FAISS holds the aspects of a search side by side, so that any linear combination of queries is one inner product, and
exact. Only the aspects that a search names are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tpips_reward.answers import name_comparison, named
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.image_files import IMAGE_SUFFIXES, ImageFile, decode
from tpips_reward.files import check_writable, write_text
from tpips_reward.metric import Metric
from tpips_reward.search.ranking import OVERALL
from tpips_reward.search.staging import Staged

FORMAT_VERSION = 1
CHUNK_ROWS = 65536
PROBE_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Found:
    """One neighbour: its file, as named in the index, its row there, and its score."""

    file: str
    row: int
    score: float


class Index:
    """An index on the disk.

    Args:
        folder: that `build_index` or `write_index` wrote.

    Raises:
        TPIPSError: no index, one of another version, or damaged files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.info: dict[str, Any] = json.loads((folder / "index.json").read_text(encoding="utf-8"))
            version = self.info["format"]
            self.aspects: list[str] = list(self.info["aspects"])
            self.files: list[str] = self.info["files"]
            self.metric: str = self.info["metric"]
        except FileNotFoundError:
            raise TPIPSError(f"{folder} is no index; make one with tpips-reward index.") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TPIPSError(f"{folder / 'index.json'} cannot be read ({error}); build the index again.") from None
        if version != FORMAT_VERSION:
            raise TPIPSError(f"{folder} is of format {version!r}, this version reads {FORMAT_VERSION}; build it again.")
        self._engines: dict[tuple[str, ...], Any] = {}

    def __len__(self) -> int:
        return len(self.files)

    def check_aspect(self, aspect: str) -> str:
        """The aspect as the index names it.

        Raises:
            TPIPSError: it is not in the index; the message lists what is.
        """
        name = " ".join(aspect.split())
        if name.casefold() not in {known.casefold() for known in self.aspects}:
            raise TPIPSError(
                f"{self.folder} has no vectors for {aspect!r}; it has {', '.join(self.aspects)}. Index the folder with "
                f"--aspect {aspect!r}."
            )
        return next(known for known in self.aspects if known.casefold() == name.casefold())

    def vectors(self, aspect: str) -> np.ndarray:
        """(N, D) float32, mapped from the disk.

        Raises:
            TPIPSError: the aspect is unknown, or its file is missing or damaged.
        """
        path = self.folder / f"vectors-{self.aspects.index(self.check_aspect(aspect))}.npy"
        return _read(path, (len(self), int(self.info["dimension"])))

    def check_metric(self, metric: Metric) -> None:
        """Refuses a metric whose vectors are not those of this index.

        Raises:
            TPIPSError: as said.
        """
        expected = _read(self.folder / "probe.npy", (int(self.info["dimension"]),))
        given = probe(metric)
        if given.shape != expected.shape or float(given @ expected) < 1 - PROBE_TOLERANCE:
            raise TPIPSError(
                f"{self.folder} was made with other weights than this metric's; it names {self.metric!r}: give the same "
                "with --metric, or build the index again."
            )

    def search(self, combined: Mapping[str, np.ndarray], top: int) -> list[Found]:
        """The `top` images with the highest scores, best first; equal scores in the order of the index.

        Args:
            combined: of `tpips_reward.search.ranking.combine`.

        Raises:
            TPIPSError: `top` is not positive, an unknown aspect, FAISS is missing.
        """
        if top < 1:
            raise TPIPSError(f"top is {top}; ask for at least one image.")
        aspects = tuple(sorted(combined))
        query = np.concatenate([combined[aspect] for aspect in aspects]).astype(np.float32)
        values, rows = self._engine(aspects).search(query[None], min(top, len(self)))
        found = sorted(zip((-values[0]).tolist(), rows[0].tolist(), strict=True))
        return [Found(self.files[row], row, -value) for value, row in found]

    def _engine(self, aspects: tuple[str, ...]) -> Any:
        if aspects not in self._engines:
            faiss = _faiss()
            blocks = [self.vectors(aspect) for aspect in aspects]
            engine = faiss.IndexFlatIP(sum(block.shape[1] for block in blocks))
            for start in range(0, len(self), CHUNK_ROWS):  # no second copy of everything
                rows = slice(start, start + CHUNK_ROWS)
                engine.add(np.ascontiguousarray(np.concatenate([block[rows] for block in blocks], axis=1)))
            self._engines[aspects] = engine
        return self._engines[aspects]


def build_index(
    images: Path,
    aspects: Sequence[str],
    metric: Metric,
    output: Path,
    *,
    metric_name: str,
    batch_images: int = 32,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Index:
    """Embeds the images of a folder in several aspects; each image is encoded once for all of them.

    Args:
        images: a folder; its subfolders count too.
        aspects: beside "overall", which is always there.
        metric: late fusion.
        output: appears whole or not at all.
        metric_name: by which `search` finds the metric again.
        progress: called with the images done and all of them after each batch; what it raises ends the build.

    Raises:
        TPIPSError: no images, bad aspects, a metric without embeddings, an output that is there. Files that are no
            images are skipped, and named in index.json. After any error nothing is left.
    """
    names = check_aspects([aspects] if isinstance(aspects, str) else aspects)
    if not hasattr(metric.fusion, "embed"):
        raise TPIPSError(
            f"{metric_name!r} is of {metric.fusion.kind} fusion, which has no embeddings; use late fusion."
        )
    for name in names:
        metric.check_aspect(name)
    if batch_images < 1:
        raise TPIPSError(f"batch_images is {batch_images}; give at least 1.")
    files = image_files(images)
    check_output(output, overwrite)
    output = output.resolve()  # "." has its parent elsewhere, and is another folder once it is replaced
    skipped: dict[str, str] = {}
    kept: list[str] = []
    with Staged(output, partial(check_output, output, overwrite)) as staging:
        arrays: list[np.ndarray] = []
        for start in range(0, len(files), batch_images):
            batch = {}
            for path in files[start : start + batch_images]:
                label = path.relative_to(images).as_posix()
                try:
                    batch[label] = decode(ImageFile(path).read(), label)
                except TPIPSError as error:
                    skipped[label] = str(error)
            if batch:
                labels = [name_comparison(name, path) for path in batch for name in names]
                with named(labels.__getitem__):
                    vectors = metric.embed(list(batch.values()), names).float().cpu().numpy()
                arrays = arrays or _open_arrays(staging, len(names), len(files), vectors.shape[2])
                for k, array in enumerate(arrays):
                    array[len(kept) : len(kept) + len(batch)] = vectors[:, k]
                kept += batch
            if progress is not None:
                progress(min(start + batch_images, len(files)), len(files))
        if not kept:
            raise TPIPSError(f"None of the {len(files)} files in {images} is an image that can be read.")
        _cut(staging, arrays, len(kept))
        np.save(staging / "probe.npy", probe(metric))
        _write_info(staging, metric_name, names, kept, arrays[0].shape[1], skipped)
    return Index(output)


def write_index(
    output: Path, files: Sequence[str], vectors: Mapping[str, np.ndarray], *, metric_name: str, probe_vector: np.ndarray
) -> Index:
    """An index of vectors that are there already: (N, D) unit vectors for each aspect, "overall" among them.

    Raises:
        TPIPSError: shapes that do not fit, no "overall", an output that is there.
    """
    shapes = {array.shape for array in vectors.values()}
    if len(shapes) != 1 or OVERALL not in vectors or next(iter(shapes))[0] != len(files):
        raise TPIPSError(f"vectors need one shape ({len(files)}, D) in all aspects and 'overall'; got {shapes}.")
    check_output(output, overwrite=False)
    output = output.resolve()
    with Staged(output, partial(check_output, output, overwrite=False)) as staging:
        for k, array in enumerate(vectors.values()):
            np.save(staging / f"vectors-{k}.npy", np.asarray(array, dtype=np.float32))
        np.save(staging / "probe.npy", probe_vector.astype(np.float32))
        _write_info(staging, metric_name, list(vectors), list(files), next(iter(shapes))[1], {})
    return Index(output)


def probe(metric: Metric) -> np.ndarray:
    """(D,) float32: the overall embedding of a fixed image, two crossed ramps of 64 x 64 pixels.

    Raises:
        NotFinite: NaN or infinite numbers.
    """
    ramp = np.linspace(0, 255, 64).astype(np.uint8)
    image = np.stack(
        [np.tile(ramp, (64, 1)), np.tile(ramp[:, None], (1, 64)), np.full((64, 64), 128, np.uint8)], axis=2
    )
    with named(lambda _: name_comparison(OVERALL, "an image made to try it")):
        return metric.embed(image, OVERALL)[0].float().cpu().numpy()


def check_aspects(aspects: Sequence[str]) -> list[str]:
    """ "overall" and the aspects, each once, with single blanks.

    Raises:
        TPIPSError: an empty aspect.
    """
    names = [OVERALL]
    for aspect in aspects:
        name = " ".join(aspect.split())
        if not name:
            raise TPIPSError("--aspect is empty; name what to search in.")
        if name.casefold() not in {known.casefold() for known in names}:
            names.append(name)
    return names


def image_files(folder: Path) -> list[Path]:
    """The images of a folder and its subfolders by their suffix, in order; links to files that are not there too.

    Raises:
        TPIPSError: it is no folder, or has none.
    """
    if not folder.is_dir():
        raise TPIPSError(f"{folder} is no folder.")
    named_so = (path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    # a link to nothing is no file, and yet an image that somebody misses: it is skipped, and named, when it is read
    found = sorted(path for path in named_so if path.is_file() or (path.is_symlink() and not path.exists()))
    if not found:
        raise TPIPSError(f"{folder} has no images ({', '.join(IMAGE_SUFFIXES)}).")
    return found


def check_output(output: Path, overwrite: bool) -> None:
    """Refuses an output that an index cannot take the place of.

    Raises:
        TPIPSError: it is there, and no index, or one and `overwrite` is not set; it holds other files, which would be lost;
            it is a link, or no place for a folder.
    """
    if output.is_symlink():
        raise TPIPSError(f"{output} is a symbolic link; give the folder that it means as --output.")
    check_writable(output)
    if not output.exists():
        return
    if not (output / "index.json").is_file():
        raise TPIPSError(f"{output} exists and is no index; give another --output.")
    if not overwrite:
        raise TPIPSError(f"{output} is an index already; replace it with --overwrite.")
    try:
        there = Index(output)
    except TPIPSError:
        raise TPIPSError(
            f"{output} is not overwritten, for it is no index of this version; move it, or give another --output."
        ) from None
    ours = {"index.json", "probe.npy", *(f"vectors-{k}.npy" for k in range(len(there.aspects)))}
    foreign = sorted({path.name for path in output.iterdir()} - ours)
    if foreign:
        raise TPIPSError(f"{output} is not overwritten, for it holds {foreign[0]}, which is no part of an index; move it.")


def _open_arrays(folder: Path, aspects: int, rows: int, width: int) -> list[np.ndarray]:
    return [
        np.lib.format.open_memmap(folder / f"vectors-{k}.npy", mode="w+", dtype=np.float32, shape=(rows, width))
        for k in range(aspects)
    ]


def _cut(folder: Path, arrays: list[np.ndarray], rows: int) -> None:
    """Leaves out the rows of skipped files."""
    for k, array in enumerate(arrays):
        array.flush()  # type: ignore[attr-defined]
        if rows < len(array):
            np.save(folder / "cut.npy", array[:rows])
            os.replace(folder / "cut.npy", folder / f"vectors-{k}.npy")


def _write_info(
    folder: Path, metric: str, aspects: list[str], files: list[str], width: int, skipped: dict[str, str]
) -> None:
    info = {
        "format": FORMAT_VERSION,
        "metric": metric,
        "aspects": aspects,
        "dimension": width,
        "skipped": skipped,
        "files": files,
    }
    write_text(folder / "index.json", json.dumps(info, indent=1, ensure_ascii=False) + "\n")


def _read(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise TPIPSError(f"{path} cannot be read ({error}); build the index again.") from None
    if array.shape != shape or array.dtype != np.float32:
        raise TPIPSError(f"{path} holds {array.dtype} {array.shape}, not float32 {shape}; build the index again.")
    return array


def _faiss() -> Any:
    try:
        import faiss
    except ModuleNotFoundError:
        raise TPIPSError("search needs FAISS, which is not installed; pip install 'tpips-reward[search]'.") from None
    return faiss
