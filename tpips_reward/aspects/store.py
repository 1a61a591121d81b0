"""The file of proposed aspects: one JSON line an edit, to be read and corrected by people.

    {"key": "0001", "instruction": "make the car red", "kind": "color", "target": ["car color"], "preserve": [...],
     "proposer": "rules", "by": "instruction", "mark": "1f0c2a9b"}

(on one line). Corrections stay: the mark is a digest of the aspects as they were proposed, so an entry whose aspects have
another one was written by a person. An entry is proposed anew only where its instruction or the proposer has changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tpips_reward.aspects.rules import BASES
from tpips_reward.aspects.validation import check_proposed
from tpips_reward.errors import TPIPSError
from tpips_reward.files import write_text

#: Of a line; the aspects, kind, proposer, by and mark may be left out.
FIELDS = ("key", "instruction", "kind", "target", "preserve", "proposer", "by", "mark")
#: So many mistakes in the file are listed in an error.
_LISTED = 20


@dataclass(frozen=True)
class Entry:
    """Aspects for one edit, as the file has them.

    Attributes:
        instruction: what they were proposed for.
        kind: of the edit; only for the reader.
        target, preserve: aspects.
        proposer: who proposed them; "" for a person.
        mark: digest of the aspects as they were proposed; "" for a person's.
        by: what the rules went by (`Proposal.by`); "" for a person's and a model's, and where the file does not say.
    """

    instruction: str
    kind: str
    target: tuple[str, ...]
    preserve: tuple[str, ...]
    proposer: str = ""
    mark: str = ""
    by: str = ""

    @property
    def edited(self) -> bool:
        """Whether a person has written or changed the aspects."""
        return self.mark != aspects_mark(self.target, self.preserve)


def aspects_mark(target: Sequence[str], preserve: Sequence[str]) -> str:
    """Eight hexadecimal digits that stand for these aspects."""
    return hashlib.sha256(json.dumps([list(target), list(preserve)]).encode()).hexdigest()[:8]


def read_entries(path: Path) -> dict[str, Entry]:
    """The file's entries by key; none where there is no file.

    Raises:
        TPIPSError: the file cannot be read, a line is no entry or has a field that no entry has (it would be lost when the
            file is written), its aspects break the rules, or a key is there twice. People edit this file, so an error
            names the line, and all such lines.
    """
    if not path.exists():
        return {}
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TPIPSError(f"The aspects in {path} cannot be read: {error}.") from None
    entries: dict[str, Entry] = {}
    mistakes = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            key, entry = _parse(line)
            if key in entries:
                raise TPIPSError(f"the key {key!r} is there twice; keep one.")
            entries[key] = entry
        except TPIPSError as error:
            mistakes.append(f"line {number}: {error}")
    if mistakes:
        more = f" There are {len(mistakes) - _LISTED} more." if len(mistakes) > _LISTED else ""
        raise TPIPSError(f"{path}, {' '.join(mistakes[:_LISTED])}{more}")
    return entries


def add_entries(path: Path, made: Mapping[str, Entry]) -> None:
    """Adds entries to the file, or replaces those of the same keys. The others stay as they are in the file now: people
    and other evaluations may have written to it since it was read; what a person wrote there for the same instruction
    stays too. Without entries nothing is written.

    Raises:
        TPIPSError: as `read_entries` and `write_entries`.
    """
    if made:
        now = read_entries(path)
        written = {key: e for key, e in now.items() if key in made and e.edited and e.instruction == made[key].instruction}
        kept = {key: replace(e, by="") for key, e in written.items()}
        write_entries(path, {**now, **made, **kept})


def write_entries(path: Path, entries: Mapping[str, Entry]) -> None:
    """Writes entries, atomically, in the order of the mapping.

    Raises:
        TPIPSError: the disk refuses.
    """
    lines = [
        json.dumps(
            {
                "key": key,
                "instruction": e.instruction,
                "kind": e.kind,
                "target": list(e.target),
                "preserve": list(e.preserve),
                **({"proposer": e.proposer} if e.proposer else {}),
                **({"by": e.by} if e.by else {}),
                **({"mark": e.mark} if e.mark else {}),
            },
            ensure_ascii=False,
        )
        for key, e in entries.items()
    ]
    try:
        write_text(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise TPIPSError(f"The proposed aspects cannot be written to {path}: {error.strerror or error}.") from error


def _parse(line: str) -> tuple[str, Entry]:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise TPIPSError(f"no JSON ({error.msg} at character {error.pos}).") from None
    if not isinstance(content, dict):
        raise TPIPSError("an entry is an object, {...}.")
    for name in ("key", "instruction"):
        if not isinstance(content.get(name), str):
            raise TPIPSError(f'"{name}" is {content.get(name)!r}; give text.')
    foreign = sorted(content.keys() - set(FIELDS))
    if foreign:
        raise TPIPSError(f"{foreign[0]!r} is no field of an entry ({', '.join(FIELDS)}) and would be lost; is this a file of aspects?")
    lists = {}
    for name in ("preserve", "target"):
        lists[name] = content.get(name, [])
        if not isinstance(lists[name], list):
            raise TPIPSError(f'"{name}" is {lists[name]!r}; give a list of aspects.')
    kept, changed = check_proposed(lists["preserve"], lists["target"])
    notes = [content.get(name, "") for name in ("kind", "proposer", "mark", "by")]
    kind, proposer, mark, by = [note if isinstance(note, str) else "" for note in notes]
    return content["key"], Entry(content["instruction"], kind, changed, kept, proposer, mark, by if by in BASES else "")
