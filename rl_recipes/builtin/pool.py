"""The editor's training pairs as latents in memory: a pool that grows while the training runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage

from rl_recipes.builtin.data import edit_pairs, to_signed
from rl_recipes.builtin.instructions import InstructionStates
from rl_recipes.editors.qwen_image_edit import pack
from tpips_reward.errors import TPIPSError

#: Pairs that are encoded together.
_BLOCK = 8


class LatentPool:
    """Pairs 0, 1, 2 … of a seed, encoded once each.

    Args:
        vae: encodes the images; its config's latent statistics normalise them.
        states: knows every instruction.
        seed, drift_probability, weights: as in `edit_pairs`.
        chunk: pairs that share one block of memory, a multiple of eight.
    """

    def __init__(
        self,
        vae: AutoencoderKLQwenImage,
        states: InstructionStates,
        *,
        seed: int,
        drift_probability: float,
        weights: dict[str, float] | None = None,
        chunk: int = 1024,
    ) -> None:
        if chunk % _BLOCK:
            raise TPIPSError(f"The pool's chunks must hold a multiple of {_BLOCK} pairs, not {chunk}.")
        self._vae, self._states, self._chunk = vae, states, chunk
        self._options = {"seed": seed, "drift_probability": drift_probability, "weights": weights}
        self._count = 0
        # One tensor a chunk of pairs: growing one big tensor would copy it each time.
        self._chunks: list[dict[str, torch.Tensor]] = []

    def __len__(self) -> int:
        return self._count

    @torch.no_grad()
    def grow(self, count: int) -> None:
        """Adds pairs until there are ``count`` at least.

        They are encoded in blocks of a fixed size: results of other batch sizes differ in their last bits, and a
        training that resumes must find the same pool.
        """
        while self._count < count:
            self._append(range(self._count, self._count + _BLOCK))
            self._count += _BLOCK

    def batch(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pairs ``ids`` (B,).

        Returns:
            source tokens (B, T, C) float32, target tokens (B, T, C) float32, which tokens are to change (B, T) bool,
            and the instructions' indices (B,).
        """
        rows = [(self._chunks[i // self._chunk], i % self._chunk) for i in ids.tolist()]
        names = ("source", "target", "changed", "instruction")
        source, target, changed, instruction = (torch.stack([chunk[n][row] for chunk, row in rows]) for n in names)
        return source.float(), target.float(), changed, instruction

    def _append(self, indices: range) -> None:
        pairs = edit_pairs(indices=indices, **self._options)  # type: ignore[arg-type]
        source, target = (self._encode(to_signed(images)) for images in (pairs.sources, pairs.targets))
        rows = pairs.changed.shape[-1] // int(source.shape[1] ** 0.5)
        new = {
            # Half precision is far finer than the latents' own noise, and halves the memory.
            "source": source.half(),
            "target": target.half(),
            "changed": F.max_pool2d(pairs.changed[:, None].float(), rows).flatten(1) > 0,
            "instruction": torch.tensor([self._states.index[s] for s in pairs.instructions]),
        }
        start = self._count % self._chunk
        if start == 0:
            self._chunks.append({k: v.new_zeros((self._chunk, *v.shape[1:])) for k, v in new.items()})
        for name, value in new.items():
            self._chunks[-1][name][start : start + len(indices)] = value

    def _encode(self, images: torch.Tensor) -> torch.Tensor:
        latents = self._vae.encode(images.unsqueeze(2)).latent_dist.mode()
        config = self._vae.config
        mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
        return pack((latents - mean) / std)
