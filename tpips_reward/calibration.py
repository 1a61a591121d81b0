"""From a raw similarity to the probability that people call two images the same in an aspect.

Raw cosines live in a narrow band, 0.5 to 0.9 say, and where in it "the same" begins differs from metric to metric and from
aspect to aspect. A calibration is a monotone map fitted to people's votes (`python -m metric_training.calibrate`): knots
between which it is linear, one map for all aspects and optionally one for each. It is a JSON file beside the metric.

What the probability is of depends on the question that was voted on. Of three images people name the odd one: a pair's
probability is the share of voters who leave it together, and 1/3 is chance. Of two candidates they name the one nearer to
the reference: it is the share that prefers one, and 1/2 is chance. Two equal images have 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpips_reward.answers import checked_similarities, name_comparison
from tpips_reward.errors import TPIPSError
from tpips_reward.files import write_text

CALIBRATION_NAME = "tpips_calibration.json"
FORMAT = 1
#: A metric whose answers differ by more than this share of the calibrated band is another one than was calibrated.
_OTHER_METRIC = 0.1


@dataclass(frozen=True)
class MonotoneMap:
    """Piecewise linear and never falling; constant beyond its ends.

    Attributes:
        raw: K >= 2 similarities, strictly rising.
        probability: K values in [0, 1], never falling, the last larger than the first.
    """

    raw: tuple[float, ...]
    probability: tuple[float, ...]

    def __post_init__(self) -> None:
        raw, chance = self.raw, self.probability
        numbers = [*raw, *chance]
        if any(isinstance(v, bool) or not isinstance(v, (int, float)) or not math.isfinite(v) for v in numbers):
            raise TPIPSError("A calibration's knots must be finite numbers.")
        if len(raw) < 2 or len(raw) != len(chance) or any(a >= b for a, b in pairwise(raw)):
            raise TPIPSError("A calibration needs at least two knots, with strictly rising similarities.")
        if any(a > b for a, b in pairwise(chance)) or not 0 <= chance[0] < chance[-1] <= 1:
            raise TPIPSError("A calibration's probabilities must lie in [0, 1] and rise with the similarity.")

    def __call__(self, similarity: Tensor) -> Tensor:
        """Similarities of any shape -> probabilities, same shape and dtype; gradients flow between the knots."""
        raw = torch.tensor(self.raw, dtype=torch.float64, device=similarity.device)
        chance = torch.tensor(self.probability, dtype=torch.float64, device=similarity.device)
        inside = similarity.double().clamp(raw[0], raw[-1])
        right = torch.searchsorted(raw, inside.detach(), right=True).clamp(1, len(raw) - 1)
        left = right - 1
        share = (inside - raw[left]) / (raw[right] - raw[left])
        return (chance[left] + share * (chance[right] - chance[left])).to(similarity.dtype)


@dataclass(frozen=True)
class Calibration:
    """The maps of one metric.

    Attributes:
        overall: for every aspect without a map of its own.
        aspects: name -> map.
        phrases: phrase -> name of its map, for wordings of an aspect; compared without case.
        probe: what the calibrated metric answered to `probe_answers`' images.
        facts: where it comes from: votes, their number, the error before and after.
    """

    overall: MonotoneMap
    aspects: Mapping[str, MonotoneMap] = field(default_factory=dict)
    phrases: Mapping[str, str] = field(default_factory=dict)
    probe: tuple[float, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def map_for(self, aspect: str | None) -> MonotoneMap:
        """The map of an aspect: its own, that of the aspect which it is a wording of, or the one for all."""
        name = ("overall" if aspect is None else aspect).strip().casefold()
        return self.aspects.get(self.phrases.get(name, name), self.overall)

    def apply(self, similarities: Tensor, aspects: Sequence[str | None]) -> Tensor:
        """(N,) similarities, in an aspect each -> (N,) probabilities."""
        result = torch.empty_like(similarities)
        groups: dict[int, tuple[MonotoneMap, list[int]]] = {}
        for position, aspect in enumerate(aspects):
            chosen = self.map_for(aspect)
            groups.setdefault(id(chosen), (chosen, []))[1].append(position)
        for chosen, members in groups.values():
            index = torch.tensor(members, device=similarities.device)
            result = result.index_copy(0, index, chosen(similarities[index]))
        return result

    def check_metric(self, metric: Any) -> None:
        """Refuses a metric that answers otherwise than the one that was calibrated.

        Raises:
            TPIPSError: it does.
        """
        tolerance = _OTHER_METRIC * (self.overall.raw[-1] - self.overall.raw[0])
        answers = probe_answers(metric)
        if len(answers) != len(self.probe) or any(
            abs(a - b) > tolerance for a, b in zip(answers, self.probe, strict=True)
        ):
            raise TPIPSError(
                "The calibration was made for other weights: this metric's answers differ from those of the one that was "
                "calibrated. Run python -m metric_training.calibrate for it."
            )

    def save(self, path: str | Path) -> None:
        """Writes the JSON file atomically.

        Raises:
            TPIPSError: the disk refuses.
        """
        content = {
            "format": FORMAT,
            "overall": {"raw": self.overall.raw, "probability": self.overall.probability},
            "aspects": {
                name: {"raw": found.raw, "probability": found.probability} for name, found in self.aspects.items()
            },
            "phrases": dict(self.phrases),
            "probe": self.probe,
            "facts": dict(self.facts),
        }
        try:
            write_text(Path(path), json.dumps(content, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise TPIPSError(f"The calibration {path} cannot be written: {error.strerror or error}.") from error

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads what `save` wrote.

        Raises:
            TPIPSError: missing, damaged, or of another format.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise TPIPSError(
                    f"The calibration {path} is of format {content['format']!r}, this version reads {FORMAT}; calibrate "
                    "anew."
                )
            phrases = {str(phrase): str(name) for phrase, name in content["phrases"].items()}
            aspects = {str(name): _read_map(found) for name, found in content["aspects"].items()}
            probe = tuple(float(value) for value in content["probe"])
            return cls(_read_map(content["overall"]), aspects, phrases, probe, dict(content["facts"]))
        except FileNotFoundError:
            raise TPIPSError(f"The calibration {path} does not exist; make it by metric_training.calibrate.") from None
        except TPIPSError as error:
            raise TPIPSError(f"{path}: {error}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TPIPSError(f"The calibration {path} is damaged ({error}); make it anew.") from None


def _read_map(content: Any) -> MonotoneMap:
    return MonotoneMap(tuple(content["raw"]), tuple(content["probability"]))


def probe_answers(metric: Any) -> list[float]:
    """What a metric answers to two fixed images in three aspects: it tells metrics, and their weights, apart.

    Raises:
        NotFinite: NaN or infinite numbers, which are like no other metric's.
    """
    ramp = torch.linspace(0, 1, 64)
    first = torch.stack([ramp.expand(64, 64), ramp.flip(0).expand(64, 64), ramp[:, None].expand(64, 64)])
    second = first.flip(0) * 0.5
    pairs = [(0, 0, "overall"), (0, 0, "background color"), (0, 0, "lighting")]

    def label(position: int) -> str:
        return name_comparison(pairs[position][2], "two images made to try it")

    answers = checked_similarities(metric, [first], [second], pairs, label)
    return answers.detach().float().tolist()


def no_calibration() -> TPIPSError:
    """The error of a metric without a calibration."""
    return TPIPSError(
        f"This metric has no calibration ({CALIBRATION_NAME} beside its weights); make one by python -m "
        "metric_training.calibrate, or leave out calibrated."
    )


class CalibratedMetric:
    """A metric whose similarities are probabilities; for rewards and evaluations it is a metric like any other.

    Args:
        metric: the raw one.
        calibration: a calibration, or the path of one; None takes the one beside the metric.

    Raises:
        TPIPSError: there is none, it is damaged, or it was made for other weights.
    """

    range = (0.0, 1.0)

    def __init__(self, metric: Any, calibration: Calibration | str | Path | None = None) -> None:
        if isinstance(calibration, (str, Path)):
            calibration = Calibration.load(calibration)
        found = calibration or getattr(metric, "calibration", None)
        if found is None:
            raise no_calibration()
        found.check_metric(metric)
        self.metric, self.calibration = metric, found

    @property
    def change_scale(self) -> float:
        """The raw metric's, as a loss of probability from that of two equal images."""
        edge = torch.tensor([self.metric.range[1], self.metric.range[1] - self.metric.change_scale], dtype=torch.float64)
        same, edited = self.calibration.overall(edge).tolist()
        return max(same - edited, 1e-4)

    def similarity_pairs(
        self, images: Any, references: Any, pairs: Sequence[tuple[int, int, str]], **options: Any
    ) -> Tensor:
        """As `Metric.similarity_pairs`, (N,) in [0, 1]."""
        raw = self.metric.similarity_pairs(images, references, pairs, **options)
        if raw.shape != (len(pairs),) or not bool(torch.isfinite(raw.detach()).all()):
            return raw  # the caller says what is wrong; clamping would hide it
        return self.calibration.apply(raw, [aspect for _, _, aspect in pairs])

    def __getattr__(self, name: str) -> Any:
        if name in ("metric", "calibration"):  # not set yet
            raise AttributeError(name)
        return getattr(self.metric, name)
