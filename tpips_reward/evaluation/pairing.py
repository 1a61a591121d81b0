"""From a name to a file, strictly: what is nearly right is named and not taken.

Names are compared with the folder's own listing, so that the answer is the same on file systems that ignore case.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.image_files import IMAGE_SUFFIXES, ImageFile, ImageRef
from tpips_reward.evaluation.rows import Problem


@dataclass
class Listing:
    """The names in folders, each folder read once."""

    _names: dict[Path, tuple[frozenset[str], frozenset[str]]] = field(default_factory=dict)

    def names(self, folder: Path) -> frozenset[str]:
        """Names of the files in a folder; none where there is no such folder."""
        return self._read(folder)[0]

    def others(self, folder: Path) -> frozenset[str]:
        """Names of what is no file there: folders, pipes, links to nothing."""
        return self._read(folder)[1]

    def _read(self, folder: Path) -> tuple[frozenset[str], frozenset[str]]:
        if folder not in self._names:
            try:
                with os.scandir(folder) as entries:
                    is_file = {entry.name: entry.is_file() for entry in entries}
            except (FileNotFoundError, NotADirectoryError):
                is_file = {}
            except OSError as error:
                raise TPIPSError(f"The folder {folder} cannot be read: {error.strerror or error}.") from error
            files = frozenset(name for name, regular in is_file.items() if regular)
            self._names[folder] = files, frozenset(is_file) - files
        return self._names[folder]


@dataclass(frozen=True)
class Found:
    """A file, or why there is none. `kind` may also say something about a file that was found."""

    path: Path | None
    kind: str = ""
    detail: str = ""


def find_path(path: Path, listing: Listing) -> Found:
    """The file of exactly this name: a manifest that names a file means that file."""
    names = listing.names(path.parent)
    if path.name in names:
        return Found(path)
    if path.name in listing.others(path.parent) or path.is_dir():  # "." and ".." are in no listing
        return _no_file(path)
    alike = sorted(name for name in names if name.casefold() == path.name.casefold())
    if alike:
        return Found(None, "wrong_case", f"{path} does not exist, but {alike[0]} does; correct the case.")
    siblings = sorted(name for name in names if Path(name).stem == path.stem and is_image_name(name))
    if siblings:
        return Found(None, "other_suffix", f"{path} does not exist, but {siblings[0]} does; correct the suffix.")
    return Found(None, "missing", f"{path} does not exist.")


def find_key(folder: Path, key: str, listing: Listing, suffix: str | None = None) -> Found:
    """The image file of a key in a folder of results: `folder/key.png`, or another image suffix where it is the only
    one.

    Args:
        folder: a model's results.
        key: a file name without suffix, possibly with folders before it ("animal/7").
        suffix: the layout's own suffix; another one is found all the same, and said. None: any is as good.
    """
    home, stem = (folder / key).parent, PurePosixPath(key).name
    names = [name for name in listing.names(home) if is_image_name(name)]
    own = sorted(name for name in names if _stem(name) == stem)
    if len(own) > 1:
        detail = f"{home} has {', '.join(own)} for the key {key!r}; keep the one that is meant."
        return Found(None, "doubled_file", detail)
    if own:
        if suffix is None or own[0] == stem + suffix:
            return Found(home / own[0])
        return Found(home / own[0], "other_suffix", f"{home / own[0]} stands for {stem + suffix}; it is used.")
    alike = sorted(name for name in names if _stem(name).casefold() == stem.casefold())
    if alike:
        detail = f"{home} has {alike[0]} for the key {key!r}; correct the case."
        return Found(None, "wrong_case", detail)
    for name in sorted(listing.others(home)):
        if is_image_name(name) and _stem(name) == stem:
            return _no_file(home / name)
    return Found(None, "missing", f"{folder} has no image for the key {key!r}.")


def _no_file(path: Path) -> Found:
    what = "a folder" if path.is_dir() else "no regular file" if path.exists() else "a link to nothing"
    return Found(None, "unreadable", f"{path} is {what}; name the image file that is meant.")


def unexpected_files(folder: Path, keys: Iterable[str], listing: Listing, model: str) -> list[Problem]:
    """Images in a folder of results that belong to no key."""
    names = list(keys)
    known = {key.casefold() for key in names}
    places = {folder, *((folder / key).parent for key in names)}
    problems = []
    for place in sorted(places):
        for name in sorted(listing.names(place)):
            key = (place / _stem(name)).relative_to(folder).as_posix()
            if is_image_name(name) and key.casefold() not in known:
                detail = f"{place / name} belongs to no row."
                problems.append(Problem("unexpected_file", detail, model=model, left_out=False))
    return problems


def output_of(found: Found | ImageRef, key: str, model: str) -> tuple[ImageRef | None, list[Problem]]:
    """What a search for a model's output means for a row; an image that needs no search is passed on."""
    if not isinstance(found, Found):
        return found, []
    if not found.kind:
        return ImageFile(found.path) if found.path else None, []
    kind = {"missing": "missing_output", "unreadable": "unreadable_output"}.get(found.kind, found.kind)
    problem = Problem(kind, found.detail, key, model, left_out=found.path is None)
    return (ImageFile(found.path) if found.path else None), [problem]


def source_of(found: Found | ImageRef, key: str) -> tuple[ImageRef | None, list[Problem]]:
    """What a search for a source means for a row; an image that needs no search is passed on."""
    if not isinstance(found, Found):
        return found, []
    if not found.kind:
        return ImageFile(found.path) if found.path else None, []
    kind = {"missing": "missing_source", "unreadable": "unreadable_source"}.get(found.kind, found.kind)
    problem = Problem(kind, f"Source: {found.detail}", key, left_out=found.path is None)
    return (ImageFile(found.path) if found.path else None), [problem]


def check_folder(folder: Path, what: str) -> None:
    """Refuses what is no folder.

    Args:
        what: it is, for the message, such as "of the model 'base'".

    Raises:
        TPIPSError: it does not exist, or is a file.
    """
    if not folder.is_dir():
        state = "is no folder" if folder.exists() else "does not exist"
        raise TPIPSError(f"The folder {folder} {what} {state}; give the folder that holds the images.")


def is_image_name(name: str) -> bool:
    """Whether a file's name says that it is an image; hidden files do not count."""
    return not name.startswith(".") and Path(name).suffix.lower() in IMAGE_SUFFIXES


def _stem(name: str) -> str:
    return name[: -len(Path(name).suffix)] if Path(name).suffix else name
