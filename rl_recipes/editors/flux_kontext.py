"""FLUX.1-Kontext, built from the parts of diffusers' `FluxKontextPipeline`.

The source's tokens follow those of the edit, with 1 instead of 0 as the first of their three coordinates. The pipeline's own
call moves every source to one of seventeen sizes of about a million pixels; this editor keeps its own sizes.
"""

from __future__ import annotations

from typing import ClassVar

from rl_recipes.editors.flux import Flux


class FluxKontext(Flux):
    """FLUX.1-Kontext: one condition image. See `Flux` for the options and `Editor` for the methods."""

    pipeline_class: ClassVar[str] = "FluxKontextPipeline"
    sees_image: ClassVar[bool] = True
