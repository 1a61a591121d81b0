"""TPIPSReward: edits, their sources and aspects in; one score a sample out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tpips_reward.answers import checked_similarities, name_comparison
from tpips_reward.calibration import CalibratedMetric
from tpips_reward.errors import TPIPSError
from tpips_reward.rewards.aspects import AspectsArgument, sample_name
from tpips_reward.rewards.gate import Gate
from tpips_reward.rewards.pairs import Pair, PairTable, segment_mean
from tpips_reward.rewards.samples import Samples, check_needed, read_aspects, read_samples
from tpips_reward.rewards.spec import RewardSpec, parse_reward
from tpips_reward.rewards.terms import MODES, SampleMeans, Scale


class PairMetric(Protocol):
    """What a reward needs of a metric; `tpips_reward.metric.Metric` has it."""

    @property
    def range(self) -> tuple[float, float]: ...

    @property
    def change_scale(self) -> float: ...

    def similarity_pairs(
        self, images: Any, references: Any, pairs: Sequence[Pair], *, value_range: tuple[float, float] = (0.0, 1.0)
    ) -> Tensor: ...


@dataclass(frozen=True)
class RewardOutput:
    """What a reward answers.

    scores: (B,) float32, higher is better; with a graph to the images where they require grad.
    per_aspect: a dict a sample: "preserve" {aspect: f(edit, source)}, "target" {aspect: change from the source}, and
        "target_image" {aspect: f(edit, target image)} where a target image was given.
    terms: (B,) float32 each, without a graph, for logs: "preserve" (mean similarity), "target" (mean change, or
        closeness to the target image), "change" (mean change from the source), "gate" (how far the change opens it,
        also where it is switched off). NaN where a sample has no such aspects: take `nanmean` over a batch.
    parts: (B,) float32 each, with the graph: the rewards that were added, by name, before they were weighted.
    """

    scores: Tensor
    per_aspect: list[dict[str, dict[str, float]]]
    terms: dict[str, Tensor]
    parts: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Plan:
    """Indices into the metric's result by role; segments say which sample each belongs to."""

    table: PairTable = field(default_factory=PairTable)
    roles: dict[str, list[int]] = field(default_factory=lambda: {"preserve": [], "target": [], "target_image": []})
    samples: dict[str, list[int]] = field(default_factory=lambda: {"preserve": [], "target": [], "target_image": []})

    def add(self, role: str, sample: int, reference: int, aspect: str) -> None:
        self.roles[role].append(self.table.add(sample, reference, aspect))
        self.samples[role].append(sample)


class TPIPSReward:
    """Scores edits by what they keep and what they change.

    Args:
        reward: "tpips:preserve", "tpips:target", "tpips:edit", or several with weights:
            "tpips:preserve=0.7,tpips:target=0.3" (a weighted sum). docs/rewards.md has the formulas.
        metric: a name or folder for `load_metric`, or a metric object.
        device, dtype: for `load_metric`; a metric object brings its own.
        gate: "change" (default) makes `tpips:preserve` depend on the change in the target aspects where a sample has
            some; "none" gives the plain mean.
        gate_threshold: mean target change that opens the gate fully; default: the metric's `change_scale`.
        gate_weight: what a closed gate costs.
        value_range: lowest and highest value of float images, (-1, 1) for a VAE's; PIL and uint8 images have their own.
        calibrated: True puts the probability that people call two images the same in an aspect in place of the raw
            similarity, by the calibration beside the metric (`python -m metric_training.calibrate`); or the path of such
            a file. All formulas then work on [0, 1].

    Raises:
        TPIPSError: unknown reward, mode or gate; a bad weight or threshold; whatever `load_metric` raises.

    Example:
        reward = TPIPSReward("tpips:preserve")
        out = reward(edits, source, preserve=[["background", "lighting"]], target=[["car color"]])
        out.scores
    """

    def __init__(
        self,
        reward: str | RewardSpec = "tpips:preserve",
        metric: str | PairMetric = "builtin:late",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        gate: str = "change",
        gate_threshold: float | None = None,
        gate_weight: float = 1.0,
        value_range: tuple[float, float] = (0.0, 1.0),
        calibrated: bool | str | Path = False,
    ) -> None:
        # The spec comes first: a typo in it must not cost the loading of a metric of 16 GB.
        self.spec = parse_reward(reward)
        if isinstance(metric, str):
            # Imported here: it takes transformers with it, seconds that a metric object does not need.
            from tpips_reward.checkpoints import load_metric

            self.metric: PairMetric = load_metric(metric, device=device, dtype=dtype)
        elif device is not None or dtype is not None:
            raise TPIPSError("device and dtype are for a metric given by name; move the metric object itself instead.")
        else:
            self.metric = metric
        if calibrated:
            self.metric = CalibratedMetric(self.metric, None if calibrated is True else calibrated)
        guessed = gate_threshold is None and not getattr(self.metric, "is_calibrated", True)
        if guessed and gate != "none" and any(item.mode in ("preserve", "edit") for item in self.spec.items):
            warnings.warn(
                f"This metric does not say how far a true edit moves an aspect; the gate opens at the rough value "
                f"{self.metric.change_scale:g}. Measure the target change of good edits (terms['change'] of the output) and "
                "pass a third of its median as gate_threshold.",
                stacklevel=2,
            )
        lowest, highest = self.metric.range
        typical = self.metric.change_scale if gate_threshold is None else gate_threshold
        self.gate = Gate(gate, typical, gate_weight)
        self.scale = Scale(lowest, highest, typical)
        self.value_range = value_range

    def requires(self, kind: str) -> bool:
        """Whether every sample must have aspects of this kind ("preserve" or "target")."""
        return self.spec.requires(kind)

    def check_aspects(self, preserve: Sequence[str], target: Sequence[str] = ()) -> None:
        """Refuses what a call would refuse for one sample's aspects; nothing is measured.

        Raises:
            TPIPSError: empty, doubled, contradictory or over-long aspects, control tokens in them, or none of a kind that
                the mode needs.
        """
        kept, changed = read_aspects(self.spec, preserve, target)
        check = getattr(self.metric, "check_aspect", None)
        if check is not None:
            for aspect in [*kept, *changed]:
                check(aspect)

    def __call__(
        self,
        images: Any,
        references: Any,
        preserve: AspectsArgument = None,
        target: AspectsArgument = None,
        target_images: Any = None,
    ) -> RewardOutput:
        """Scores B edits. Every (edit, source, aspect) is measured once, all in one call of the metric.

        Args:
            images: the edits: a list of images, or a batch (B, 3, H, W); every kind of image that the metric accepts.
            references: the sources: one for all, or one each; equal ones are encoded once.
            preserve, target: the aspects to keep and to change: a list a sample, or one list for all. Aspects that the
                mode does not need are measured and reported too.
            target_images: optional images of the intended result, one for all or one each (None where there is none).

        Raises:
            TPIPSError: wrong numbers of images or aspects, aspects that the mode needs and that are missing, empty,
                doubled or contradictory aspects.
            NotFinite: the metric's answer to a pair; it names the sample and the aspect, and its position counts pairs.
        """
        samples = read_samples(images, references, preserve, target, target_images)
        check_needed(self.spec, samples.kept, samples.changed)
        edits, count = samples.edits, len(samples.edits)
        plan = _plan(samples)
        wants_graph = torch.is_grad_enabled() and any(isinstance(e, Tensor) and e.requires_grad for e in edits)
        with torch.set_grad_enabled(wants_graph):
            values = self._measure(edits, plan.table)
            means = self._means(values, plan, count)
            scores = torch.zeros(count, dtype=torch.float32, device=values.device)
            parts = {item.name: MODES[item.mode].term(means, self.scale, self.gate.penalty) for item in self.spec.items}
            for item in self.spec.items:
                scores = scores + item.weight * parts[item.name]
        return RewardOutput(scores, self._per_aspect(values, plan, count), _log_terms(means, plan, self), parts)

    def _measure(self, edits: list[Any], table: PairTable) -> Tensor:
        def label(position: int) -> str:
            sample, _, aspect = table.pairs[position]
            return name_comparison(aspect, sample_name(sample, len(edits)).lower())

        return checked_similarities(
            self.metric, edits, table.references, table.pairs, label, value_range=self.value_range
        ).float()

    def _means(self, values: Tensor, plan: _Plan, count: int) -> SampleMeans:
        def mean(role: str, of: Tensor) -> Tensor:
            return segment_mean(of[plan.roles[role]], plan.samples[role], count)

        change = mean("target", self.scale.change(values))
        return SampleMeans(
            preserve=mean("preserve", values),
            change=change,
            gate=self.gate.openness(change),
            closeness=mean("target_image", values),
            has_target=_mask(plan.samples["target"], count, values.device),
            has_target_image=_mask(plan.samples["target_image"], count, values.device),
        )

    def _per_aspect(self, values: Tensor, plan: _Plan, count: int) -> list[dict[str, dict[str, float]]]:
        similarities = values.detach().tolist()
        changes = self.scale.change(values.detach()).tolist()
        answer: list[dict[str, dict[str, float]]] = [{"preserve": {}, "target": {}} for _ in range(count)]
        for role, positions in plan.roles.items():
            numbers = changes if role == "target" else similarities
            for sample, position in zip(plan.samples[role], positions, strict=True):
                aspect = plan.table.pairs[position][2]
                answer[sample].setdefault(role, {})[aspect] = numbers[position]
        return answer


def _plan(samples: Samples) -> _Plan:
    plan = _Plan()
    kept, changed = samples.kept, samples.changed
    for sample, (source, ideal) in enumerate(zip(samples.sources, samples.ideals, strict=True)):
        if kept[sample] or changed[sample]:
            reference = plan.table.reference(source)
            for role, aspects in (("preserve", kept[sample]), ("target", changed[sample])):
                for aspect in aspects:
                    plan.add(role, sample, reference, aspect)
        if ideal is not None:
            reference = plan.table.reference(ideal)
            for aspect in changed[sample]:
                plan.add("target_image", sample, reference, aspect)
    return plan


def _mask(samples: list[int], count: int, device: torch.device) -> Tensor:
    mask = torch.zeros(count, dtype=torch.bool)
    mask[samples] = True
    return mask.to(device)


def _log_terms(means: SampleMeans, plan: _Plan, reward: TPIPSReward) -> dict[str, Tensor]:
    """Detached terms; NaN says "not measured", which a mean of 0 would hide."""
    nan = torch.full_like(means.preserve, float("nan")).detach()
    has_preserve = _mask(plan.samples["preserve"], len(nan), nan.device)
    target = MODES["target"].term(means, reward.scale, 0.0)
    terms = {"target": target, "change": means.change, "gate": means.gate}
    return {
        "preserve": torch.where(has_preserve, means.preserve.detach(), nan),
        **{name: torch.where(means.has_target, term.detach(), nan) for name, term in terms.items()},
    }
