"""The reward inside trainers that people already have: one file a trainer, all on `EditScorer`.

None of these files imports the trainer it serves; `docs/integrations.md` shows each in use.
"""

from tpips_reward.adapters.core import EditScorer, SampleAspects, aspects_of

__all__ = ["EditScorer", "SampleAspects", "aspects_of"]
