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
from tpips_reward.evaluation.rows import Problem, check_model_name


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
                    is_file = {entry.name: _is_file(entry) for entry in entries}
            except (FileNotFoundError, NotADirectoryError):
                is_file = {}
            except OSError as error:
                raise TPIPSError(f"The folder {folder} cannot be read: {error.strerror or error}.") from error
            files = frozenset(name for name, regular in is_file.items() if regular)
            self._names[folder] = files, frozenset(is_file) - files
        return self._names[folder]


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link that leads to itself
        return False


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


class Pairing:
    """Finds the images that rows name, and lists in `problems` what is not as it should be. Each folder is read once."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._listing = Listing()

    def source(self, value: str | ImageRef, home: Path, key: str) -> ImageRef | None:
        """A row's source: a path relative to `home`, or an image that stands in a table."""
        return self._take(self._find(value, home), "source", key)

    def output(self, value: str | ImageRef, home: Path, key: str, model: str) -> ImageRef | None:
        """A model's output, named as a source is."""
        return self._take(self._find(value, home), "output", key, model)

    def output_in(self, folder: Path, key: str, model: str, suffix: str | None = None) -> ImageRef | None:
        """A model's output in a folder of results, by its key (`find_key`)."""
        return self._take(find_key(folder, key, self._listing, suffix), "output", key, model)

    def list_unexpected(self, folder: Path, keys: Iterable[str], model: str) -> None:
        """Lists images in a folder of results that belong to no key."""
        names = list(keys)
        known = {key.casefold() for key in names}
        places = {folder, *((folder / key).parent for key in names)}
        for place in sorted(places):
            for name in sorted(self._listing.names(place)):
                key = (place / _stem(name)).relative_to(folder).as_posix()
                if is_image_name(name) and key.casefold() not in known:
                    detail = f"{place / name} belongs to no row."
                    self.problems.append(Problem("unexpected_file", detail, model=model, left_out=False))

    def _find(self, value: str | ImageRef, home: Path) -> Found | ImageRef:
        if isinstance(value, ImageFile):
            return find_path(value.path, self._listing)
        return find_path(home / value.strip(), self._listing) if isinstance(value, str) else value

    def _take(self, found: Found | ImageRef, role: str, key: str, model: str = "") -> ImageRef | None:
        if not isinstance(found, Found):  # an image that stands in a table needs no search
            return found
        if found.kind:
            kind = f"{found.kind}_{role}" if found.kind in ("missing", "unreadable") else found.kind
            detail = f"Source: {found.detail}" if role == "source" else found.detail
            self.problems.append(Problem(kind, detail, key, model, left_out=found.path is None))
        return ImageFile(found.path) if found.path else None


def folders_by_model(given: Iterable[tuple[object, str | Path]]) -> dict[str, Path]:
    """Each model's folder of results, by its name.

    Raises:
        TPIPSError: a name is none, two differ in blanks only, or a folder does not exist.
    """
    folders: dict[str, Path] = {}
    for name, folder in given:
        model = check_model_name(name)
        if model in folders:
            raise TPIPSError(f"Two models are called {model!r} but for blanks; rename one.")
        folders[model] = Path(folder)
    for model, folder in folders.items():
        check_folder(folder, f"of the model {model!r}")
    return folders


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
