"""How good the editor is on edits that it is not trained on, before and after: same edits, same initial noise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils import gather_object
from rich import markup
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rl_recipes.algorithms.hacks import copies
from rl_recipes.collecting import decode, encode, fitted_source, same_size_batches, score
from rl_recipes.job import Job, any_process
from rl_recipes.prompts import Prompt, PromptSource
from rl_recipes.reporting import KNOWN
from rl_recipes.rollout import rollout
from rl_recipes.runs import RunError, write_atomic, write_json
from rl_recipes.seeds import EVALUATION, generator
from rl_recipes.sharding import calls_together
from tpips_reward.scenes import measure_edit
from tpips_reward.stopping import Interrupted

#: Measures of ``summary.json``; the second value says which direction is better (+1 higher, -1 lower).
MEASURES: dict[str, int] = {
    "reward": 1, "preserve": 1, "target": 1, "edit_success": 1, "drift": -1, "object_lost": -1, "l1_to_ideal": -1, "copy_rate": -1,
}  # fmt: skip
#: What a row has beside them.
_ABOUT = ("key", "kind", "instruction", "aspects")
#: Before the name of each reward of several, as in ``metrics.jsonl``; they are measures too, higher is better.
_PART = "reward/"
_BOOTSTRAP = 2000
#: With fewer pairs a resampled mean says nothing about the spread, and there is no standard error.
MIN_PAIRS = 8

T = TypeVar("T")


@dataclass
class Evaluation:
    """The measures of each edit, and the first few edited images.

    Attributes:
        rows: a dict an edit: ``key``, ``kind``, ``instruction``, ``aspects`` (its similarities and changes by aspect), and
            every name of :data:`MEASURES`, None where it cannot be known (edits of photographs have no ideal). ``reward``
            is the weighted sum that is trained on; of several rewards each is there too, not weighted, as ``reward/name``.
        images: the first edits, (3, H, W) float in [0, 1], for the grids.
        seconds: what the evaluation took.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    images: list[torch.Tensor] = field(default_factory=list)
    seconds: float = 0.0

    def means(self) -> dict[str, float | None]:
        """The mean of each measure over the edits for which it is known."""
        return {name: _mean([row.get(name) for row in self.rows]) for name in measures(self)}

    def images_by_key(self) -> dict[str, torch.Tensor]:
        """The first edited images by the key of their row."""
        return {row["key"]: image for row, image in zip(self.rows, self.images, strict=False)}

    def by_kind(self) -> dict[str, dict[str, float | None]]:
        """The same for each kind of edit."""
        kinds = sorted({row["kind"] for row in self.rows if row["kind"]})
        return {kind: Evaluation([r for r in self.rows if r["kind"] == kind]).means() for kind in kinds}

    def save(self, folder: Path) -> None:
        """Keeps it as ``before.json`` and ``before.safetensors``, so that a run that resumes need not repeat it."""
        tensors = {f"{i:04d}": image.contiguous() for i, image in enumerate(self.images)}
        write_atomic(folder / "before.safetensors", lambda p: save_file(tensors, p))
        write_json(folder / "before.json", {"rows": self.rows, "seconds": self.seconds})

    @classmethod
    def load(cls, folder: Path) -> Evaluation | None:
        """What :meth:`save` kept, or None where it did not get so far.

        Raises:
            RunError: when the files are damaged.
        """
        path = folder / "before.json"
        if not path.exists():
            return None
        remedy = f"remove {path}, and --resume evaluates the editor without its training again"
        try:
            images = load_file(folder / "before.safetensors")
        except (OSError, SafetensorError) as error:
            raise RunError(f"{folder / 'before.safetensors'} is damaged ({error}); {remedy}.") from error
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            rows, seconds = kept["rows"], float(kept["seconds"])
            if any({name for name in row if not name.startswith(_PART)} != {*_ABOUT, *MEASURES} for row in rows):
                raise KeyError("a row has other measures")
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"{path} is damaged, or of another version ({error}); {remedy}.") from error
        return cls(rows, [images[name] for name in sorted(images)], seconds)


def measures(*evaluations: Evaluation) -> dict[str, int]:
    """The measures of some evaluations, each with the direction that is better: :data:`MEASURES`, and the parts of a reward."""
    parts = {name: 1 for evaluation in evaluations for row in evaluation.rows for name in row if name.startswith(_PART)}
    return {"reward": 1, **parts, **MEASURES}


@torch.no_grad()
def evaluate(
    job: Job, prompts: PromptSource, count: int, name: str, progress: Callable[[int], None] = lambda done: None
) -> Evaluation:
    """Edits the first ``count`` prompts once each, without added noise, and measures the results.

    ``reward`` is what is optimised, of several rewards their weighted sum; ``preserve`` is the mean similarity over the
    preserve aspects and ``target`` the mean change over the target aspects, both by the reward's metric; the other measures
    come from the scenes' known parameters (``measure_edit``) alone. Initial noise depends on ``eval_seed`` and the prompt's position alone.

    Args:
        name: "before" or "after", for messages.
        progress: called with the number of this process's prompts that are done, after each batch.

    Returns:
        the evaluation; in every process where there are several.

    Raises:
        Interrupted: when any process was asked to stop.
    """
    run, guidance, accelerator = job.args.run, job.args.editor.guidance_scale, job.accelerator
    # Processes that share weights must call the transformer equally often; what is too many is dropped below.
    world = accelerator.num_processes
    own = range(accelerator.process_index, -(-count // world) * world if calls_together(accelerator) else count, world)
    found: list[tuple[int, dict[str, Any], torch.Tensor | None]] = []
    most = run.samples_per_batch or run.prompts_per_iteration * run.num_generations
    asked: Iterable[tuple[int, Prompt]] = ((index, prompts[index]) for index in own)
    if not calls_together(accelerator):
        asked = _once_each(asked, lambda item: item[1].key)
    batches = same_size_batches(asked, lambda item: job.editor.output_size(item[1].image), most)
    while True:
        batch = next(batches, None)
        # Processes may have unequal numbers of batches; each goes on answering until all are done.
        stop, more = any_process(accelerator, job.stop.requested, batch is not None)
        if stop:
            raise Interrupted
        if not more:
            break
        if batch is None:
            continue
        chosen = [prompt for _, prompt in batch]
        conditions = encode(job.editor, chosen, guidance)
        generators = [generator(run.eval_seed, EVALUATION, index) for index, _ in batch]
        steps = run.eval_inference_steps or run.num_inference_steps
        with accelerator.autocast():  # the transformer alone, as in training
            final = rollout(job.editor, conditions, generators, num_steps=steps, guidance_scale=guidance).final
        where = f"evaluation_{name}/edit_{batch[0][0]:06d}"
        edits = decode(job.editor, final, conditions, where)
        sources = [fitted_source(job.editor, prompt) for prompt in chosen]
        out = score(job.reward, edits, sources, chosen, where, job.folder)
        nothing = torch.full((len(batch),), math.nan)
        for i, (index, prompt) in enumerate(batch):
            row: dict[str, Any] = {
                "key": prompt.key,
                "kind": prompt.edit.kind if prompt.edit else None,
                "instruction": prompt.instruction,
                "reward": float(out.scores[i]),
                "aspects": out.per_aspect[i],
                "preserve": _known(out.terms.get("preserve", nothing)[i]),
                "target": _known(out.terms.get("change", nothing)[i]),
            }
            if len(job.reward.weights) > 1:
                row |= {_PART + part: _known(values[i]) for part, values in out.parts.items()}
            row |= _measure(prompt, edits[i], sources[i])
            found.append((index, row, edits[i].cpu() if index < run.sample_grids else None))
        progress(len(found))
    found = sorted((item for item in gather_object(found) if item[0] < count), key=lambda item: item[0])
    found = list(_once_each(found, lambda item: str(item[1]["key"])))
    return Evaluation([row for _, row, _ in found], [image for _, _, image in found if image is not None])


def compare(before: Evaluation, after: Evaluation) -> dict[str, dict[str, float | None]]:
    """Paired differences after - before with bootstrap standard errors and 95 % intervals.

    Returns:
        for each measure ``{"difference", "standard_error", "low", "high", "relative"}``, None where it is not known;
        the spread is not known for fewer than :data:`MIN_PAIRS` pairs.
    """
    out: dict[str, dict[str, float | None]] = {}
    # By key: a photograph that went missing between the two has no partner.
    earlier = {row["key"]: row for row in before.rows}
    both = [(earlier[row["key"]], row) for row in after.rows if row["key"] in earlier]
    for name in measures(before, after):
        pairs = [(b.get(name), a.get(name)) for b, a in both]
        values = np.array([(b, a) for b, a in pairs if b is not None and a is not None], dtype=np.float64).reshape(
            -1, 2
        )
        if not len(values):
            out[name] = dict.fromkeys(("difference", "standard_error", "low", "high", "relative"))
            continue
        differences = values[:, 1] - values[:, 0]
        start = values[:, 0].mean()
        out[name] = {
            "difference": float(differences.mean()),
            **_spread(differences),
            "relative": float(differences.mean() / abs(start)) if start else None,  # a reward may be below 0
        }
    return out


def _spread(differences: np.ndarray) -> dict[str, float | None]:
    if len(differences) < MIN_PAIRS:
        return dict.fromkeys(("standard_error", "low", "high"))
    rng = np.random.default_rng(0)
    resampled = differences[rng.integers(0, len(differences), (_BOOTSTRAP, len(differences)))].mean(1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return {"standard_error": float(resampled.std()), "low": float(low), "high": float(high)}


def setbacks(before: Evaluation, after: Evaluation) -> list[str]:
    """What got worse beyond two standard errors, in words: a reward can rise while the edits do not get better."""
    means_before, means_after, differences = before.means(), after.means(), compare(before, after)
    out = []
    for name, direction in measures(before, after).items():
        difference, error = differences[name]["difference"], differences[name]["standard_error"]
        if difference is not None and error is not None and -direction * difference > 2 * error:
            out.append(f"{name} went from {means_before[name]:.4f} to {means_after[name]:.4f}")
    return out


def comparison_table(before: Evaluation, after: Evaluation, what: str) -> Table:
    """The before/after table that ends a run; ``what`` names the edits."""
    table = Table(title=f"{len(before.rows)} {what}, same noise before and after")
    for name in ("", "before", "after", "difference", "± s.e."):
        table.add_column(name, justify="left" if not name else "right")
    means_before, means_after, differences = before.means(), after.means(), compare(before, after)
    for name, direction in measures(before, after).items():
        b, a, d = means_before.get(name), means_after.get(name), differences[name]
        if b is None and a is None:  # photographs have no known ideal to measure against
            continue
        if b is None or a is None or d["difference"] is None:
            table.add_row(markup.escape(name), "–", "–", "–", "–")
            continue
        error = d["standard_error"]
        clear = error is not None and abs(d["difference"]) > 2 * error
        style = ("green" if d["difference"] * direction > 0 else "red") if clear else ""
        relative = f" ({100 * d['relative']:+.0f} %)" if d["relative"] is not None else ""
        arrow = "↑" if direction > 0 else "↓"
        table.add_row(
            f"{markup.escape(name)} {arrow}",  # a reward's options stand in brackets
            f"{b:.4f}",
            f"{a:.4f}",
            f"{d['difference']:+.4f}{relative}",
            "–" if error is None else f"{error:.4f}",
            style=style,
        )
    return table


def _measure(prompt: Prompt, edit: torch.Tensor, source: torch.Tensor) -> dict[str, float | None]:
    if prompt.edit is None:
        return {**dict.fromkeys(KNOWN), "copy_rate": float(copies([edit], [source])[0])}
    measures = measure_edit(prompt.edit, edit)
    return {
        "edit_success": float(measures.success),
        "drift": _known(measures.drift),
        "object_lost": float(measures.object_lost),
        "l1_to_ideal": float(measures.l1_to_ideal),
        "copy_rate": float(measures.copied),
    }


def _once_each(items: Iterable[T], key: Callable[[T], str]) -> Iterator[T]:
    """Leaves out what has come before: a photograph that is broken gives its place to the next one."""
    seen: set[str] = set()
    for item in items:
        if key(item) not in seen:
            seen.add(key(item))
            yield item


def _known(value: float | torch.Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None
