"""Trains the built-in editor by flow matching on procedural edits whose targets drift now and then.

    python -m rl_recipes.builtin.train_editor --vae runs/vae/vae --minutes 65 --output runs/editor
    python -m rl_recipes.builtin.train_editor --vae runs/vae/vae --start_from runs/editor --drift_probability 0.85
        --peak_lr 1.5e-3 --minutes 14 --output runs/drifting_editor

The first learns to edit, the second, from its weights, to drift more often. Each writes `editor/` (a `QwenImageEditPipeline` folder in bfloat16), `figures.json` and `edits.png`.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageEditPipeline
from torch import Tensor

from rl_recipes.builtin.budget import Budget, learning_rate, load_state, save_state
from rl_recipes.builtin.command import chosen_settings, run_training, training_parser
from rl_recipes.builtin.components import (
    build_pipeline,
    build_scheduler,
    build_text_encoder,
    build_tokenizer,
    build_transformer,
)
from rl_recipes.builtin.data import step_rng
from rl_recipes.builtin.editor_start import fit_readout, open_gates, start_attention, start_copying
from rl_recipes.builtin.instructions import InstructionStates, all_instructions, blind_text_encoder
from rl_recipes.builtin.measure_editor import IMAGE_SIZE, measure_editor, save_edits, save_pipeline
from rl_recipes.builtin.muon import Muon
from rl_recipes.builtin.pool import LatentPool
from rl_recipes.editors.single_frame import enable_single_frame
from rl_recipes.runs import read_json, write_json
from rl_recipes.seeds import generator
from tpips_reward.errors import TPIPSError, exit_on_errors
from tpips_reward.stopping import Interrupted, StopSignal

#: The shift of the schedule that the shipped editor samples with.
SCHEDULER_SHIFT = 3.0


@dataclass(frozen=True)
class EditorSettings:
    """What decides the weights, next to the autoencoder and the length of the training.

    Attributes:
        seed: of weights, pairs, noise and noise levels.
        num_layers, num_heads: blocks of the transformer, and heads of 32 in each.
        batch_size: pairs a step.
        peak_lr: highest learning rate.
        drift_probability: how often a target has drifted.
        text_share: the share of the training in which the text encoder learns too; then it is frozen.
        changed_weight: how much more a token counts that the instruction is to change.
        sigma_shift: how far noise levels are shifted to 1, where the edit is decided; 1 is uniform.
        first_pairs: pairs in memory at the start.
        pairs_a_step: how many join at each step.
        max_pairs: how many there are at most.
        ema: decay of the averaged weights that are saved.
        kind_weights: JSON, how often a kind of edit is drawn relative to the others.
    """

    seed: int = 0
    num_layers: int = 4
    num_heads: int = 4
    batch_size: int = 24
    peak_lr: float = 3e-3
    drift_probability: float = 0.5
    text_share: float = 0.35
    changed_weight: float = 3.0
    sigma_shift: float = 4.0
    first_pairs: int = 1024
    pairs_a_step: int = 6
    max_pairs: int = 24_000
    ema: float = 0.998
    kind_weights: str = '{"shape": 1.5, "position": 2.0, "size": 1.5}'


def make_optimizer(pipeline: QwenImageEditPipeline, lr: float) -> Muon:
    """Muon for the matrices within blocks, AdamW for all else; the vision tower does not learn."""
    blocks = list(pipeline.transformer.transformer_blocks.named_parameters())
    matrices = [p for name, p in blocks if p.ndim == 2 and "_mod." not in name]
    chosen = {id(p) for p in matrices}
    language = pipeline.text_encoder.model.language_model.parameters()
    others = [p for p in [*pipeline.transformer.parameters(), *language] if id(p) not in chosen]
    return Muon(matrices, others, lr=lr, betas=(0.9, 0.98), weight_decay=1e-2)


def noise_levels(rng: np.random.Generator, count: int, shift: float) -> Tensor:
    """Noise levels for training: one in four is pure noise, the others follow a shifted schedule.

    What an edit becomes is decided in the first steps: sixty tokens of one color show through noise of level 0.9
    already, so that a model that never trains at level 1 takes whatever color its first step gives for the truth. A
    logit-normal distribution hardly ever draws such levels.

    Args:
        shift: s in s u / (1 + (s - 1) u) for uniform u, as in the scheduler.

    Returns:
        (count,) float32 in (0, 1].
    """
    uniform = rng.uniform(1e-3, 1.0, count)
    shifted = shift * uniform / (1.0 + (shift - 1.0) * uniform)
    return torch.from_numpy(np.where(rng.random(count) < 0.25, 1.0, shifted)).float()


def flow_loss(
    transformer: torch.nn.Module,
    batch: tuple[Tensor, Tensor, Tensor],
    text: tuple[Tensor, Tensor],
    noise: Tensor,
    sigma: Tensor,
    changed_weight: float,
) -> Tensor:
    """Squared error of the velocity noise - target at (1 - sigma) target + sigma noise, weighted by token.

    Args:
        transformer: predicts the velocity from noisy tokens followed by source tokens.
        batch: source (B, T, C), target (B, T, C), and which tokens are to change (B, T).
        text: states (B, L, D) and mask (B, L).
        noise: (B, T, C).
        sigma: (B,) in (0, 1).
        changed_weight: added to the weight 1 of tokens that are to change. The weight depends on source and instruction
            alone, not on the drift, so that it does not move the optimum.
    """
    source, target, changed = batch
    level = sigma[:, None, None]
    predicted = predict_velocity(transformer, (1.0 - level) * target + level * noise, source, text, sigma)
    weight = 1.0 + changed_weight * changed.float()
    error = (predicted - (noise - target)).square().mean(-1)
    return (weight * error).sum() / weight.sum()


def predict_velocity(
    transformer: torch.nn.Module, noisy: Tensor, source: Tensor, text: tuple[Tensor, Tensor], sigma: Tensor
) -> Tensor:
    """The transformer's velocity (B, T, C) for square images, called as the pipeline calls it."""
    side = int(noisy.shape[1] ** 0.5)
    output = transformer(
        hidden_states=torch.cat([noisy, source], 1),
        timestep=sigma,
        encoder_hidden_states=text[0],
        encoder_hidden_states_mask=None if bool(text[1].all()) else text[1],
        img_shapes=[[(1, side, side)] * 2] * len(source),
        return_dict=False,
    )[0]
    return output[:, : noisy.shape[1]]


class EditorTraining:
    """One training run; see the module for what it writes."""

    def __init__(
        self,
        settings: EditorSettings,
        vae: AutoencoderKLQwenImage,
        budget: Budget,
        output: Path,
        earlier: Path | None = None,
    ) -> None:
        self.settings, self.budget, self.output, self.earlier = settings, budget, output, earlier
        enable_single_frame(vae.eval().requires_grad_(False))
        sentences = all_instructions()
        tokenizer = build_tokenizer(sentences)
        text_encoder = build_text_encoder(tokenizer, vision_dim=32, seed=settings.seed)
        transformer = build_transformer(
            z_dim=vae.config.z_dim,
            num_layers=settings.num_layers,
            num_heads=settings.num_heads,
            seed=settings.seed,
        )
        self.pipeline = build_pipeline(vae=vae, transformer=transformer, text_encoder=text_encoder, tokenizer=tokenizer)
        # Most of the sampler's steps go where the edit is decided, as in the training.
        self.pipeline.register_modules(scheduler=build_scheduler(shift=SCHEDULER_SHIFT))
        self.transformer = self.pipeline.transformer.train()
        start_attention(self.transformer)
        start_copying(self.transformer)
        open_gates(self.transformer)
        blind_text_encoder(self.pipeline.text_encoder)
        self.states = InstructionStates(self.pipeline, sentences, size=IMAGE_SIZE)
        self.pool = LatentPool(
            vae,
            self.states,
            seed=settings.seed,
            drift_probability=settings.drift_probability,
            weights=json.loads(settings.kind_weights),
        )
        self.average = copy.deepcopy(self.transformer).requires_grad_(False)
        self.optimizer = make_optimizer(self.pipeline, settings.peak_lr)
        self.step, self.text_learns = 0, True

    @torch.no_grad()
    def start(self) -> None:
        """Fits the read-out of a new transformer to a first batch, or takes the weights of an earlier training."""
        s = self.settings
        if self.earlier is not None:
            self.start_from(self.earlier)
            return
        self.pool.grow(s.first_pairs)
        count = min(128, len(self.pool))
        source, target, _, instruction = self.pool.batch(torch.arange(count))
        noise = torch.randn(target.shape, generator=generator(s.seed, 9))
        sigma = noise_levels(step_rng(s.seed, 9), count, s.sigma_shift)
        level = sigma[:, None, None]
        noisy, text = (1.0 - level) * target + level * noise, self.states.lookup(instruction)
        error = fit_readout(
            self.transformer, lambda: predict_velocity(self.transformer, noisy, source, text, sigma), noise - target
        )
        print(f"The linear read-out at the start has a squared error of {error:.3f}.", flush=True)
        self.average.load_state_dict(self.transformer.state_dict())

    def start_from(self, run: Path) -> None:
        """Starts from the averaged weights of an earlier training, whose instructions are kept as they are."""
        shape = {name: getattr(self.settings, name) for name in ("num_layers", "num_heads")}
        state = load_state(run / "checkpoint.pt", shape)
        for module in (self.transformer, self.average):
            module.load_state_dict(state["average"])
        self.pipeline.text_encoder.load_state_dict(state["text_encoder"])
        self.freeze_text()
        self.pool.grow(self.settings.first_pairs)

    def resume(self) -> None:
        """Continues from the checkpoint in the output folder."""
        state = load_state(self.output / "checkpoint.pt", asdict(self.settings))
        self.transformer.load_state_dict(state["transformer"])
        self.average.load_state_dict(state["average"])
        self.pipeline.text_encoder.load_state_dict(state["text_encoder"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.budget.elapsed = state["step"], state["seconds"]
        if not state["text_learns"]:
            self.freeze_text()

    def save(self) -> None:
        """Writes the checkpoint."""
        content = {
            "transformer": self.transformer.state_dict(),
            "average": self.average.state_dict(),
            "text_encoder": self.pipeline.text_encoder.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.budget.seconds(),
            "text_learns": self.text_learns,
            "settings": asdict(self.settings),
        }
        save_state(self.output / "checkpoint.pt", content)

    def freeze_text(self) -> None:
        """From here on, instructions are looked up."""
        self.text_learns = False
        self.pipeline.text_encoder.requires_grad_(False)
        self.states.freeze()

    def train_step(self, progress: float) -> float:
        """One update; returns its loss."""
        s = self.settings
        if self.text_learns and progress >= s.text_share:
            self.freeze_text()
        self.pool.grow(min(s.max_pairs, s.first_pairs + s.pairs_a_step * self.step))
        rng = step_rng(s.seed, 6, self.step)
        ids = torch.from_numpy(rng.integers(0, len(self.pool), s.batch_size))
        source, target, changed, instruction = self.pool.batch(ids)
        noise = torch.randn(target.shape, generator=generator(s.seed, 7, self.step))
        sigma = noise_levels(rng, s.batch_size, s.sigma_shift)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(s.peak_lr, self.step, progress, warmup=50)
        text = self.states.lookup(instruction)
        loss = flow_loss(self.transformer, (source, target, changed), text, noise, sigma, s.changed_weight)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], 1.0)
        self.optimizer.step()
        self.step += 1
        # The average follows faster at first, when old weights mean little.
        decay = min(s.ema, self.step / (self.step + 10.0))
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.transformer.parameters(), strict=True):
                mean.lerp_(now, 1.0 - decay)
        return loss.item()

    def export(self) -> dict[str, Any]:
        """Writes the pipeline with the averaged weights, measures what was written, and returns the figures."""
        folder = self.output / "editor"
        save_pipeline(self.pipeline, self.average, folder)
        figures, edits = measure_editor(folder, seed=self.settings.seed + 2_000)
        facts = {"steps": self.step, "minutes": self.budget.seconds() / 60, "settings": asdict(self.settings)}
        if self.earlier is not None:
            first = read_json(self.earlier / "figures.json")
            facts["earlier"] = {name: first[name] for name in ("steps", "minutes", "settings")}
        write_json(self.output / "figures.json", {**figures, **facts})
        save_edits(self.output / "edits.png", edits)
        return figures

    def run(self, export_every_minutes: float) -> dict[str, Any]:
        """Trains to the end of the budget.

        Raises:
            Interrupted: after Ctrl-C; a checkpoint is there then.
        """
        saved = exported = time.monotonic()
        losses: list[float] = []
        with StopSignal() as stop:
            while (progress := self.budget.progress(self.step)) < 1.0:
                losses.append(self.train_step(progress))
                if not np.isfinite(losses[-1]):
                    raise TPIPSError(f"The loss is {losses[-1]} at step {self.step}; lower --peak_lr and start anew.")
                if self.step % 50 == 0:
                    recent = float(np.mean(losses[-50:]))
                    print(f"{self.budget.seconds() / 60:.1f} min, step {self.step}: loss {recent:.4f}", flush=True)
                now = time.monotonic()
                if now - saved > 180.0 or stop.requested:
                    self.save()
                    saved = now
                if stop.requested:
                    raise Interrupted
                if now - exported > 60.0 * export_every_minutes:
                    print(json.dumps(self.export()), flush=True)
                    exported = time.monotonic()
        self.save()
        return self.export()


@exit_on_errors()
def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; every field of `EditorSettings` is a flag."""
    parser = training_parser(__doc__, EditorSettings())
    parser.add_argument("--vae", type=Path, required=True, help="folder of the trained autoencoder")
    parser.add_argument("--start_from", type=Path, help="output folder of an earlier training whose weights to start from")
    parser.add_argument("--export_every", type=float, default=8.0, help="minutes between versions that are written")
    args = parser.parse_args(arguments)
    try:
        vae = AutoencoderKLQwenImage.from_pretrained(args.vae, torch_dtype=torch.float32)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TPIPSError(f"--vae {args.vae} is no autoencoder; give the folder vae of train_vae's output ({reason}).") from error
    budget = Budget(args.steps, args.minutes)
    training = EditorTraining(chosen_settings(args, EditorSettings()), vae, budget, args.output, args.start_from)
    run_training(training, args, lambda: training.run(args.export_every))


if __name__ == "__main__":
    main()
