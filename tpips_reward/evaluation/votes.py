"""People's votes: a file of a user's own, VCReward-Bench, and the two benchmarks that are both called EditReward-Bench.

VCReward-Bench (of GEditBench v2) has pairs of outputs and which of them keeps the source better. EditScore's has pairs of outputs, the better one first, in a dimension each. TIGER's has two to four candidates and a
ranking such as "A>B", "A=B" or "C>A>B". The candidates are anonymous: "first" of one row has nothing to do with
"first" of the next, so such a set compares metrics with people and not editors with each other.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.image_files import ImageFile, ImageRef
from tpips_reward.evaluation.pairing import Listing, find_path
from tpips_reward.evaluation.rows import Dataset, Problem, Row, Vote, check_key, unique_rows
from tpips_reward.evaluation.tables import parse_object, read_table, read_text, table_files, table_folder

DIMENSIONS = ("overall", "preservation", "change")
#: What EditScore's benchmark calls the dimensions.
EDITSCORE_DIMENSIONS = {"prompt_following": "change", "consistency": "preservation", "overall": "overall"}
LETTERS = "ABCDEFGHIJ"
_WINNERS = {"image a": 1, "a": 1, "image b": -1, "b": -1, "tie": 0}


def read_votes(path: str | Path, dataset: Dataset) -> Dataset:
    """Adds a user's votes: JSONL rows {"key", "first", "second", "vote", "dimension"?}.

    `vote` is "first", "second" or "tie"; `first` and `second` are models of the set; the dimension is one of
    :data:`DIMENSIONS`, by default "overall".

    Raises:
        TPIPSError: the file cannot be read or has no usable vote.
    """
    keys, votes, problems = {row.key for row in dataset.rows}, [], []
    for number, line in enumerate(read_text(Path(path)).split("\n"), 1):
        if not line.strip():
            continue
        try:
            votes.append(_vote(parse_object(line), keys, dataset.models))
        except TPIPSError as error:
            problems.append(Problem("bad_vote", f"{Path(path).name}, line {number}: {error}"))
    if not votes:
        raise TPIPSError(f"{path} has no usable vote. {problems[0].detail if problems else ''}".strip())
    return replace(dataset, votes=tuple(votes), problems=(*dataset.problems, *problems), inputs=(*dataset.inputs, Path(path)))


def _vote(entry: dict[str, Any], keys: set[str], models: tuple[str, ...]) -> Vote:
    labels = {"first": 1, "second": -1, "tie": 0}
    key = check_key(entry.get("key"))
    if key not in keys:
        raise TPIPSError(f"no usable row has the key {key!r}.")
    for side in ("first", "second"):
        if entry.get(side) not in models:
            raise TPIPSError(f'"{side}" is {entry.get(side)!r}; the models are {", ".join(models)}.')
    if entry["first"] == entry["second"]:
        raise TPIPSError(f"{entry['first']!r} is compared with itself.")
    vote = entry.get("vote")
    if not isinstance(vote, str) or vote not in labels:
        raise TPIPSError(f'"vote" is {vote!r}; it is "first", "second" or "tie".')
    dimension = entry.get("dimension", "overall")
    if dimension not in DIMENSIONS:
        raise TPIPSError(f'"dimension" is {dimension!r}; it is one of {", ".join(DIMENSIONS)}.')
    return Vote(key, entry["first"], entry["second"], labels[vote], dimension)


def read_editscore_bench(benchmark: str | Path) -> Dataset:
    """EditScore's EditReward-Bench: instruction, input_image, output_images (the better one first), task_type,
    dimension.

    Raises:
        TPIPSError: the table cannot be read or has other columns.
    """
    rows, votes, problems = [], [], []
    table, listing = read_table(Path(benchmark)), Listing()
    for number, (place, entry) in enumerate(table):
        key = f"{number:05d}"
        try:
            dimension = EDITSCORE_DIMENSIONS.get(str(entry.get("dimension")))
            if dimension is None:
                known = ", ".join(EDITSCORE_DIMENSIONS)
                raise TPIPSError(f"the dimension is {entry.get('dimension')!r}; expected one of {known}.")
            images = entry.get("output_images")
            if not isinstance(images, list) or len(images) != 2:
                raise TPIPSError("'output_images' are not two images.")
            rows.append(_bench_row(key, entry, "input_image", dict(zip(("first", "second"), images, strict=True)),
                                   Path(benchmark), listing))  # fmt: skip
            votes.append(Vote(key, "first", "second", 1, dimension))
        except TPIPSError as error:
            problems.append(Problem("bad_row", f"{place}: {error}", key))
    return _bench("EditReward-Bench (EditScore)", rows, ("first", "second"), votes, problems, "editscore", len(table), Path(benchmark))


def read_tiger_bench(benchmark: str | Path) -> Dataset:
    """TIGER's EditReward-Bench: instruction, source_image, candidate_1 …, ranking ("A>B", "A=B", "C>A>B").

    Raises:
        TPIPSError: the table cannot be read or has other columns.
    """
    rows, votes, problems, names = [], [], [], {}
    table, listing = read_table(Path(benchmark)), Listing()
    for number, (place, entry) in enumerate(table):
        key = f"{number:05d}"
        try:
            images = {}
            for position, letter in enumerate(LETTERS, 1):
                if entry.get(f"candidate_{position}") is not None:
                    images[letter] = entry[f"candidate_{position}"]
            if len(images) < 2 or list(images) != list(LETTERS[: len(images)]):
                raise TPIPSError("expected candidate_1, candidate_2 and so on, at least two.")
            order = parse_ranking(entry.get("ranking"), len(images))
            rows.append(_bench_row(key, entry, "source_image", images, Path(benchmark), listing))
            names.update(dict.fromkeys(images))
            for first, second in combinations(images, 2):
                label = (order[second] > order[first]) - (order[second] < order[first])
                votes.append(Vote(key, first, second, label, group=key))
        except TPIPSError as error:
            problems.append(Problem("bad_row", f"{place}: {error}", key))
    return _bench("EditReward-Bench (TIGER)", rows, tuple(sorted(names)), votes, problems, "tiger", len(table), Path(benchmark))


def read_vcreward_bench(benchmark: str | Path) -> Dataset:
    """VCReward-Bench: key, instruction, source_image, edited_images (two), winner ("Image A", "Image B"), task.

    Its experts were asked about visual consistency alone, so its votes are about preservation.

    Args:
        benchmark: the folder with `metadata.jsonl`, that file, or Parquet files with the images in them.

    Raises:
        TPIPSError: the table cannot be read or has other columns.
    """
    listed = Path(benchmark) / "metadata.jsonl"
    table_path = listed if listed.is_file() else Path(benchmark)
    table, listing = read_table(table_path), Listing()
    parsed, votes, problems = [], {}, []
    keys = [(place, entry.get("key")) for place, entry in table]
    for place, entry in table:
        key = ""
        try:
            key = check_key(entry.get("key"))
            images = entry.get("edited_images")
            if not isinstance(images, list) or len(images) != 2:
                raise TPIPSError("'edited_images' are not two images.")
            label = _WINNERS.get(" ".join(str(entry.get("winner")).casefold().split()))
            if label is None:
                raise TPIPSError(f"the winner is {entry.get('winner')!r}; expected 'Image A', 'Image B' or 'tie'.")
            outputs = dict(zip(("A", "B"), images, strict=True))
            row = _bench_row(key, {"task_type": entry.get("task"), **entry}, "source_image", outputs, table_path, listing)
            parsed.append(row)
            votes[key] = Vote(key, "A", "B", label, "preservation")
        except TPIPSError as error:
            problems.append(Problem("bad_row", f"{place}: {error}", key))
    rows, doubled = unique_rows(parsed, keys)
    kept = [votes[row.key] for row in rows]
    return _bench("VCReward-Bench", rows, ("A", "B"), kept, [*problems, *doubled], "vcreward", len(table), table_path)


def parse_ranking(text: object, count: int) -> dict[str, int]:
    """ "C>A=B" -> place of each candidate, {"C": 0, "A": 1, "B": 1}; "A=B=Good" and "A=B=Bad" are ties too.

    Raises:
        TPIPSError: it does not name each of the first `count` letters once.
    """
    if not isinstance(text, str):
        raise TPIPSError(f"the ranking is {text!r}; expected text such as 'A>B'.")
    plain = re.sub(r"=\s*(good|bad)\s*$", "", text.strip(), flags=re.IGNORECASE).replace(" ", "")
    parts = re.split(r"([<>=])", plain)
    letters, signs = parts[::2], parts[1::2]
    if sorted(letters) != list(LETTERS[:count]) or {"<", ">"} <= set(signs):
        raise TPIPSError(f"the ranking is {text!r}; expected each of {', '.join(LETTERS[:count])} once, with > and =.")
    if "<" in signs:
        letters, signs = letters[::-1], signs[::-1]
    places, place = {letters[0]: 0}, 0
    for sign, letter in zip(signs, letters[1:], strict=True):
        place += sign != "="
        places[letter] = place
    return places


def _bench_row(
    key: str, entry: dict[str, Any], source: str, images: dict[str, Any], table: Path, listing: Listing
) -> Row:
    instruction = entry.get("instruction")
    if not isinstance(instruction, str):
        raise TPIPSError(f"'instruction' is {instruction!r}; expected text.")
    refs = {name: _image(value, table, name, listing) for name, value in images.items()}
    category = entry.get("task_type")
    category = category.strip() if isinstance(category, str) and category.strip() else "uncategorized"
    return Row(key, _image(entry.get(source), table, source, listing), instruction.strip(), refs, category=category)


def _image(value: Any, table: Path, name: str, listing: Listing) -> ImageRef:
    """An image in the table, or a path relative to it."""
    if isinstance(value, str) and value.strip():
        value = ImageFile(table_folder(table) / value.strip())
    if isinstance(value, ImageFile):
        found = find_path(value.path, listing)
        if found.path is None:
            raise TPIPSError(found.detail)
    if value is None or isinstance(value, str | list):
        raise TPIPSError(f"{name!r} has no image.")
    return value


def _bench(
    name: str,
    rows: list[Row],
    models: tuple[str, ...],
    votes: list[Vote],
    problems: list[Problem],
    rule: str,
    total: int,
    table: Path,
) -> Dataset:
    if not rows:
        raise TPIPSError(f"{name} has no usable row. {problems[0].detail if problems else ''}".strip())
    return Dataset(name, tuple(rows), models, tuple(problems), tuple(votes), rule, anonymous=True, total_rows=total,
                   inputs=tuple(table_files(table)))  # fmt: skip
