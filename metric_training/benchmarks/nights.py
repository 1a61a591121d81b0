"""NIGHTS (DreamSim): which of two variations is nearer to a reference, without an aspect.

Layout, from the README and loader of the DreamSim repository (`ssundaram21/dreamsim`, dataset/): a folder with
`data.csv` (columns id, left_vote, right_vote, votes, ref_path, left_path, right_path, split, is_imagenet), `ref/` and
`distort/`; paths are relative to it. Triplets with fewer than 6 votes are left out, those that remain are unanimous.
The 2AFC score is the share of triplets in which the metric agrees, equal distances counted half; the test split is
reported as a whole and by whether the category is ImageNet's. The aspect is "overall" (paper, §B.1 and table 3).
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from metric_training.benchmarks.protocol import Loaded, Settings, require
from metric_training.data.comparison import Comparison, Data, DataError, image_source
from metric_training.data.rows import read_rows

FEWEST_VOTES = 6
_COLUMNS = ("id", "left_vote", "right_vote", "votes", "ref_path", "left_path", "right_path", "split")


def load(folder: Path, settings: Settings) -> Loaded:
    """The comparisons of a split (default "test"), source "imagenet" or "other".

    Raises:
        DataError: no data.csv, a column missing, or nothing in the split; a bad row where strict.
    """
    table = require(folder / "data.csv", "give the folder of NIGHTS that holds data.csv, ref/ and distort/ (--data).")
    rows = read_rows(table, image_root=settings.image_root, strict=settings.strict)
    split = settings.split or "test"
    data = Data("NIGHTS", "two_afc", [], rows.problems, {"triplets of other splits": 0, "triplets with few votes": 0})
    for line, row in rows.rows:
        missing = [column for column in _COLUMNS if column not in row]
        if missing:
            raise DataError(f"{table} is not NIGHTS' table: {', '.join(missing)} missing among {', '.join(row)}.")
        try:
            if row["split"] != split:
                data.dropped["triplets of other splits"] += 1
                continue
            left, right, votes = (_number(row, column) for column in ("left_vote", "right_vote", "votes"))
            if math.isnan(votes):
                raise DataError("votes must be a number, not nan.")
            if votes < FEWEST_VOTES:
                data.dropped["triplets with few votes"] += 1
                continue
            if min(left, right) < 0 or not 0 < left + right < math.inf:
                raise DataError(f"left_vote and right_vote must be shares, not {left:g} and {right:g}.")
            images = tuple(image_source(row[name], rows.root) for name in ("ref_path", "left_path", "right_path"))
            for image in images:
                image.check()
        except DataError as error:
            rows.problems.add(line, str(error))
            continue
        if settings.limit is not None and len(data.comparisons) >= settings.limit:
            break
        shares = np.array([[left, right]], np.float64) / (left + right)
        source = "imagenet" if str(row.get("is_imagenet", "")).casefold() == "true" else "other"
        data.comparisons.append(
            Comparison(str(row["id"]), "two_afc", images, ("overall",), shares.astype(np.float32), source=source)  # type: ignore[arg-type]
        )
    data.require_any()
    return Loaded(data, {"triplets": len(data.comparisons)}, rows.problems)


def _number(row: dict[str, str], column: str) -> float:
    try:
        return float(row[column])
    except ValueError:
        raise DataError(f"{column} must be a number, not {row[column]!r}.") from None
