"""Trains the built-in editor's autoencoder on procedural scenes.

    python -m rl_recipes.builtin.train_vae --minutes 7 --output runs/vae

writes `runs/vae/vae/` (diffusers format, float32, with the latents' statistics), `figures.json` and
`reconstructions.png`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage

from rl_recipes.builtin.budget import Budget, learning_rate, load_state, save_state
from rl_recipes.builtin.command import chosen_settings, run_training, training_parser
from rl_recipes.builtin.components import build_vae, set_latent_statistics
from rl_recipes.builtin.data import autoencoder_batch, held_out_edits, step_rng, to_signed
from rl_recipes.builtin.muon import Muon
from rl_recipes.builtin.pictures import save_grid
from rl_recipes.builtin.vae_start import start_linear
from rl_recipes.editors.single_frame import enable_single_frame
from rl_recipes.runs import write_json
from rl_recipes.seeds import generator
from tpips_reward.errors import TPIPSError, exit_on_errors
from tpips_reward.scenes import render, sample_scene
from tpips_reward.stopping import Interrupted, StopSignal


@dataclass(frozen=True)
class VAESettings:
    """What decides the weights, next to the length of the training.

    Attributes:
        seed: of weights, images and posterior samples.
        base_dim: width of the autoencoder at full resolution.
        z_dim: latent channels.
        batch_size: images a step.
        peak_lr: highest learning rate.
        kl_weight: weight of the mean Kullback-Leibler term a latent value.
        huber: where the reconstruction loss turns from squared to absolute, in units of [-1, 1].
        crop: side of the crops that most of the training sees: four times the steps in the same time.
        crop_share: the share of the training on crops; the rest sees whole images.
    """

    seed: int = 0
    base_dim: int = 16
    z_dim: int = 8
    batch_size: int = 8
    peak_lr: float = 8e-3
    kl_weight: float = 1e-4
    huber: float = 0.1
    crop: int = 32
    crop_share: float = 0.7


def moments(vae: AutoencoderKLQwenImage, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log-variance (B, z, 1, H/4, W/4) of the latents of (B, 3, H, W) images in [-1, 1]."""
    mean, logvar = vae.quant_conv(vae.encoder(images.unsqueeze(2))).chunk(2, dim=1)
    return mean, logvar.clamp(-30.0, 20.0)


def reconstruct(vae: AutoencoderKLQwenImage, latents: torch.Tensor) -> torch.Tensor:
    """(B, 3, H, W) images of (B, z, 1, h, w) latents, not clamped: a clamp has no gradient outside its range."""
    return vae.decoder(vae.post_quant_conv(latents))[:, :, 0]


def vae_loss(
    vae: AutoencoderKLQwenImage, images: torch.Tensor, noise: torch.Tensor, settings: VAESettings
) -> torch.Tensor:
    """Huber reconstruction loss plus the weighted KL term to a standard normal, both means over their elements."""
    mean, logvar = moments(vae, images)
    restored = reconstruct(vae, mean + (0.5 * logvar).exp() * noise)
    kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
    return F.smooth_l1_loss(restored, images, beta=settings.huber) + settings.kl_weight * kl


def random_crop(images: torch.Tensor, size: int, rng: np.random.Generator) -> torch.Tensor:
    """One crop a batch, (B, 3, size, size), at any multiple of four pixels."""
    top, left = (4 * int(rng.integers(0, (side - size) // 4 + 1)) for side in images.shape[-2:])
    return images[:, :, top : top + size, left : left + size]


def psnr(images: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio in dB of (B, 3, H, W) images in [-1, 1], after rounding to 8 bit; (B,)."""
    rounded = ((restored.clamp(-1, 1) + 1) * 127.5).round() / 127.5 - 1
    error = (images - rounded).square().mean((1, 2, 3)).clamp_min(1e-10)
    return 10.0 * torch.log10(4.0 / error)


@torch.no_grad()
def held_out_images(count: int = 48, seed: int = 1_000) -> dict[str, torch.Tensor]:
    """Images never trained on, in [-1, 1]: sources and ideals of test edits, and arbitrary scenes."""
    edits = held_out_edits(seed, count)
    rng = step_rng(seed, 3)
    groups = {
        "edits": [render(scene) for edit in edits for scene in (edit.source, edit.ideal)],
        "scenes": [render(sample_scene(rng)) for _ in range(count)],
    }
    return {name: to_signed(torch.from_numpy(np.stack(images))) for name, images in groups.items()}


@torch.no_grad()
def evaluate_vae(vae: AutoencoderKLQwenImage, images: dict[str, torch.Tensor]) -> dict[str, float]:
    """Mean PSNR (dB) of the posterior's mode, a figure a group of images."""
    return {
        name: float(torch.cat([psnr(b, reconstruct(vae, moments(vae, b)[0])) for b in group.split(32)]).mean())
        for name, group in images.items()
    }


@torch.no_grad()
def latent_statistics(vae: AutoencoderKLQwenImage, seed: int, batches: int = 24) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each latent channel over training images."""
    latents = torch.cat([moments(vae, autoencoder_batch(step_rng(seed, 4, i), 16))[0] for i in range(batches)])
    return latents.mean((0, 2, 3, 4)).tolist(), latents.std((0, 2, 3, 4)).tolist()


class VAETraining:
    """One training run; see the module for what it writes."""

    def __init__(self, settings: VAESettings, budget: Budget, output: Path) -> None:
        self.settings, self.budget, self.output, self.step = settings, budget, output, 0
        self.vae = build_vae(base_dim=settings.base_dim, z_dim=settings.z_dim, seed=settings.seed).train()
        enable_single_frame(self.vae)
        start_linear(self.vae, torch.Generator().manual_seed(settings.seed))
        named = list(self.vae.named_parameters())
        kernels, others = ([p for n, p in named if n.endswith("weight") == kernel] for kernel in (True, False))
        self.optimizer = Muon(kernels, others, lr=settings.peak_lr)

    def start(self) -> None:
        """A new autoencoder needs nothing beyond its weights."""

    def resume(self) -> None:
        """Continues from the checkpoint in the output folder."""
        state = load_state(self.output / "checkpoint.pt", asdict(self.settings))
        self.vae.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.budget.elapsed = state["step"], state["seconds"]

    def save(self) -> None:
        """Writes the checkpoint."""
        content = {"model": self.vae.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        facts = {"seconds": self.budget.seconds(), "settings": asdict(self.settings)}
        save_state(self.output / "checkpoint.pt", content | facts)

    def train_step(self, progress: float) -> float:
        """One update; returns its loss."""
        s = self.settings
        rng = step_rng(s.seed, 0, self.step)
        images = autoencoder_batch(rng, s.batch_size)
        if progress < s.crop_share:
            images = random_crop(images, s.crop, rng)
        shape = (len(images), self.vae.config.z_dim, 1, images.shape[-2] // 4, images.shape[-1] // 4)
        noise = torch.randn(shape, generator=generator(s.seed, 8, self.step))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(s.peak_lr, self.step, progress)
        loss = vae_loss(self.vae, images, noise, s)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.vae.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def run(self) -> dict[str, Any]:
        """Trains to the end of the budget, writes everything, and returns the figures.

        Raises:
            Interrupted: after Ctrl-C; a checkpoint is there then.
        """
        test, saved = held_out_images(), time.monotonic()
        with StopSignal() as stop:
            while (progress := self.budget.progress(self.step)) < 1.0:
                loss = self.train_step(progress)
                if not math.isfinite(loss):
                    raise TPIPSError(f"The loss is {loss} at step {self.step}; lower --peak_lr and start anew.")
                if self.step % 200 == 0:
                    line = ", ".join(f"{k} {v:.2f} dB" for k, v in evaluate_vae(self.vae, test).items())
                    minutes = self.budget.seconds() / 60
                    print(f"{minutes:.1f} min, step {self.step}: loss {loss:.4f}, {line}", flush=True)
                if time.monotonic() - saved > 120.0 or stop.requested:
                    self.save()
                    saved = time.monotonic()
                if stop.requested:
                    raise Interrupted
        self.save()
        self.vae.eval()
        set_latent_statistics(self.vae, *latent_statistics(self.vae, self.settings.seed))
        facts = {"steps": self.step, "minutes": self.budget.seconds() / 60, "settings": asdict(self.settings)}
        return write_vae(self.vae, self.output, test, facts)


def write_vae(
    vae: AutoencoderKLQwenImage, output: Path, test: dict[str, torch.Tensor], facts: dict[str, Any]
) -> dict[str, Any]:
    """Writes the weights, the figures and a picture of originals above their reconstructions."""
    vae.save_pretrained(output / "vae")
    figures = {"psnr": evaluate_vae(vae, test), "parameters": sum(p.numel() for p in vae.parameters()), **facts}
    write_json(output / "figures.json", figures)
    shown = torch.cat([group[:16] for group in test.values()])
    with torch.no_grad():
        restored = reconstruct(vae, moments(vae, shown)[0])
    save_grid(output / "reconstructions.png", [list((shown + 1) / 2), list((restored.clamp(-1, 1) + 1) / 2)])
    return figures


@exit_on_errors()
def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; every field of `VAESettings` is a flag."""
    args = training_parser(__doc__, VAESettings()).parse_args(arguments)
    training = VAETraining(chosen_settings(args, VAESettings()), Budget(args.steps, args.minutes), args.output)
    run_training(training, args, training.run)


if __name__ == "__main__":
    main()
