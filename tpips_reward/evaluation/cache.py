"""Similarities that were measured once: a file a source image, found by content and not by name.

What names a file is the source's bytes and the metric's fingerprint, and inside it an output's bytes. So a renamed
file is still known, a changed one is not, and an interrupted evaluation goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpips_reward.calibration import probe_answers
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.rows import Problem
from tpips_reward.files import write_text
from tpips_reward.rewards.reward import PairMetric

FORMAT = 1
Known = dict[str, dict[str, float]]
"""Output's digest -> aspect -> similarity."""


def fingerprint(metric: PairMetric, name: str = "") -> str:
    """What tells two metrics apart: their name and what they answer to two fixed images.

    The answers count because a folder can be trained further under the same name. A metric that answers differently on
    another device or in another dtype is another one.
    """
    answer = probe_answers(metric)
    bounds = [str(bound) for bound in metric.range]
    content = json.dumps([FORMAT, name, type(metric).__name__, bounds, [f"{value:.5g}" for value in answer]])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


class ScoreCache:
    """Cached similarities in a folder; `folder=None` keeps them in memory only.

    Args:
        folder: made when the first scores are written.
        identity: of the metric and of whatever else changes scores (see `fingerprint`).
        clear: start anew: called once, when the first scores are there to be written. Until then nothing that lies in the
            folder is read, and nothing is lost should the metric not work.
    """

    def __init__(self, folder: Path | None, identity: str, clear: Callable[[], None] | None = None) -> None:
        self.folder, self.identity, self._clear = folder, identity, clear
        self.problems: list[Problem] = []
        self._known: dict[str, Known] = {}

    def known(self, source: str) -> Known:
        """What was measured against a source (its digest). An unreadable file counts as empty, and is listed."""
        if source not in self._known:
            self._known[source] = self._read(source)
        return self._known[source]

    def add(self, source: str, found: Known) -> None:
        """Adds similarities and writes the source's file.

        Raises:
            TPIPSError: the disk refuses; what was written before stays.
        """
        known = self.known(source)
        for output, scores in found.items():
            known.setdefault(output, {}).update(scores)
        if self.folder is None:
            return
        if self._clear is not None:
            self._clear()
            self._clear = None
        try:
            write_text(self._path(source), json.dumps({"format": FORMAT, "source": source, "scores": known}) + "\n")
        except OSError as error:
            raise TPIPSError(f"Scores cannot be kept in {self.folder}: {error.strerror or error}.") from error

    def _path(self, source: str) -> Path:
        assert self.folder is not None
        return self.folder / self.identity / f"{source}.json"

    def _read(self, source: str) -> Known:
        if self.folder is None or self._clear is not None:
            return {}
        path = self._path(source)
        try:
            return _checked(json.loads(path.read_text(encoding="utf-8")), source)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            detail = f"{path} cannot be read ({error}); its scores are measured anew."
            self.problems.append(Problem("unreadable_cache", detail, left_out=False))
            return {}


def _checked(content: Any, source: str) -> Known:
    """The scores of a cache file; anything but finite numbers in the expected places is a ValueError."""
    if content["format"] != FORMAT or content["source"] != source:
        raise ValueError("it belongs to something else")
    known: Known = {}
    for output, scores in content["scores"].items():
        known[output] = {}
        for aspect, value in scores.items():
            if not isinstance(value, float | int) or isinstance(value, bool) or not math.isfinite(value):
                raise ValueError(f"{value!r} is no similarity")
            known[output][aspect] = float(value)
    return known
