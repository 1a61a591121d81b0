"""One evaluation from rows to a report: check, propose, score, count, write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tpips_reward
from tpips_reward.aspects import Proposer, RuleProposer, add_entries
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.cache import ScoreCache, fingerprint
from tpips_reward.evaluation.checking import SIZE_POLICIES, check_images
from tpips_reward.evaluation.controls import CONTROLS
from tpips_reward.evaluation.differences import Resampling
from tpips_reward.evaluation.folder import ASPECTS_NAME, CACHE_NAME, clear_folder, keep_inputs, open_folder
from tpips_reward.evaluation.measures import measure
from tpips_reward.evaluation.proposals import propose_aspects, without_aspects
from tpips_reward.evaluation.report import write_report
from tpips_reward.evaluation.rows import Dataset, first_of
from tpips_reward.evaluation.scoring import Progress, score_rows, with_scored_outputs
from tpips_reward.evaluation.summary import summarize
from tpips_reward.files import check_writable
from tpips_reward.rewards.reward import PairMetric
from tpips_reward.rewards.terms import Scale

MetricSource = PairMetric | Callable[[], PairMetric]


@dataclass(frozen=True)
class Settings:
    """How an evaluation is made.

    Attributes:
        sizes: outputs of another size than their source are brought to it ("resize"), scored as they are ("keep"),
            or left out ("skip").
        batch_images: images in one call of the metric, about.
        seed: of the noise control, the bootstrap and the sign flips.
        resamples: bootstrap resamples, and sign flips at least.
        level: of the intervals.
        tie_margin: two overall scores that differ by no more are a tie.
        examples: how many best and worst edits of each model the page shows.
        strict: any problem with the input is an error.
    """

    sizes: str = "resize"
    batch_images: int = 64
    seed: int = 0
    resamples: int = 2000
    level: float = 0.95
    tie_margin: float = 0.01
    examples: int = 6
    strict: bool = False

    def __post_init__(self) -> None:
        if self.sizes not in SIZE_POLICIES:
            raise TPIPSError(f"sizes is {self.sizes!r}; choose one of {', '.join(SIZE_POLICIES)}.")
        for name, lowest in (("batch_images", 2), ("resamples", 100), ("examples", 0), ("seed", 0)):
            if getattr(self, name) < lowest:
                raise TPIPSError(f"{name} is {getattr(self, name)}; give {lowest} or more.")
        if not 0 < self.level < 1:
            raise TPIPSError(f"level is {self.level}; give a share between 0 and 1, such as 0.95.")
        if not 0 <= self.tie_margin < 1:
            raise TPIPSError(f"tie_margin is {self.tie_margin}; give a difference of two scores, from 0 to 1.")


def evaluate(
    dataset: Dataset,
    metric: MetricSource,
    output: str | Path,
    *,
    metric_name: str = "",
    settings: Settings | None = None,
    aspects_file: str | Path | None = None,
    proposer: Callable[[], Proposer] = RuleProposer,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Scores a data set and writes the report.

    Args:
        dataset: of `read_manifest` or one of the layouts.
        metric: a metric, or a function that loads one: it is called when the input has been checked.
        output: the report's folder.
        metric_name: for the report; part of what names cached scores.
        aspects_file: proposed aspects, read and written; default: `aspects.jsonl` in `output`.
        proposer: makes what proposes aspects where rows name none; `tpips_reward.aspects.parse_proposer` gives one.
        overwrite: replace a report that is there, once the metric has given the first scores. Its aspects file stays,
            since people may have corrected it.
        resume: go on with an evaluation that was interrupted: what is scored already is not scored again.
        progress: called with (rows done, rows).

    Returns:
        The content of `report.json`.

    Raises:
        TPIPSError: the folder is taken, a file would be replaced that is read, nothing can be scored, or a problem with `strict`; whatever the metric raises.
    """
    options = settings or Settings()
    proposals = Path(aspects_file) if aspects_file is not None else Path(output) / ASPECTS_NAME
    keep_inputs(dataset, Path(output), proposals)
    folder = open_folder(Path(output), overwrite=overwrite, resume=resume)
    check_writable(folder, proposals)
    dataset = check_images(dataset, options.sizes)
    proposed = propose_aspects(dataset, proposals, proposer)
    dataset = proposed.dataset
    problems = [*dataset.problems, *without_aspects(dataset)]
    _check(dataset, problems, options.strict)

    loaded: PairMetric = metric() if not hasattr(metric, "similarity_pairs") else metric  # type: ignore[assignment]
    clear = partial(clear_folder, folder) if overwrite else None
    cache = ScoreCache(folder / CACHE_NAME, fingerprint(loaded, metric_name), clear)
    add_entries(proposals, proposed.made)  # only now: a run that has failed so far leaves nothing behind
    sizes = "resize" if options.sizes == "resize" else "keep"
    scores = score_rows(
        dataset.rows,
        loaded,
        cache=cache,
        sizes=sizes,
        batch_images=options.batch_images,
        seed=options.seed,
        progress=progress,
    )
    problems += scores.problems
    rows = with_scored_outputs(dataset.rows, scores)
    _check(replace(dataset, rows=tuple(rows)), problems, options.strict)

    lowest, highest = loaded.range
    columns = (*dataset.models, *CONTROLS)
    measured = measure(rows, columns, scores.values, Scale(lowest, highest, loaded.change_scale))
    how = Resampling(options.resamples, options.level, options.tie_margin, options.seed)
    report = summarize(dataset, measured, scores.sources, problems, how)
    report["metric"] = _metric_facts(loaded, metric_name)
    report["settings"] = asdict(options)
    report["aspect_origins"] = proposed.origins
    report["work"] = {
        "pairs_measured": scores.measured,
        "pairs_cached": scores.cached,
        "images_encoded": scores.images,
        "seconds": round(scores.seconds, 3),
        "version": tpips_reward.__version__,
    }
    write_report(folder, report, rows, options.examples)
    return report


def _check(dataset: Dataset, problems: list[Any], strict: bool) -> None:
    harmful = [problem for problem in problems if problem.left_out]
    if strict and problems:
        raise TPIPSError(f"{len(problems)} problems with the input, the first: {problems[0].detail}")
    if not any(row.outputs for row in dataset.rows):
        raise TPIPSError(f"{dataset.name} has no output that can be scored.{first_of(harmful)}")


def _metric_facts(metric: PairMetric, name: str) -> dict[str, Any]:
    lowest, highest = metric.range
    facts: dict[str, Any] = {
        "name": name or type(metric).__name__,
        "range": [lowest if lowest > float("-inf") else None, highest],
        "change_scale": metric.change_scale,
        "change_scale_measured": bool(getattr(metric, "is_calibrated", True)),
    }
    fusion = getattr(metric, "fusion", None)
    if fusion is not None:
        facts["fusion"] = fusion.kind
    license_name = getattr(metric, "info", {}).get("license")
    return facts | ({"license": str(license_name)} if license_name else {})
