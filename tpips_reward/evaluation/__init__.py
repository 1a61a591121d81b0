"""Editors compared by what they keep and what they change: rows in, a report out. docs/evaluation.md describes it.

Names are imported on first use, so that the command line's `--help` stays quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpips_reward.evaluation.layouts import read_gedit, read_gedit_v2, read_imgedit
    from tpips_reward.evaluation.manifest import read_manifest
    from tpips_reward.evaluation.rows import Dataset, Problem, Row, Vote
    from tpips_reward.evaluation.run import Settings, evaluate
    from tpips_reward.evaluation.scoring import Scores, score_rows
    from tpips_reward.evaluation.votes import read_editscore_bench, read_tiger_bench, read_vcreward_bench, read_votes

_HOMES = {
    "Dataset": "rows",
    "Problem": "rows",
    "Row": "rows",
    "Scores": "scoring",
    "Settings": "run",
    "Vote": "rows",
    "evaluate": "run",
    "read_editscore_bench": "votes",
    "read_gedit": "layouts",
    "read_gedit_v2": "layouts",
    "read_imgedit": "layouts",
    "read_manifest": "manifest",
    "read_tiger_bench": "votes",
    "read_vcreward_bench": "votes",
    "read_votes": "votes",
    "score_rows": "scoring",
}

__all__ = [
    "Dataset",
    "Problem",
    "Row",
    "Scores",
    "Settings",
    "Vote",
    "evaluate",
    "read_editscore_bench",
    "read_gedit",
    "read_gedit_v2",
    "read_imgedit",
    "read_manifest",
    "read_tiger_bench",
    "read_vcreward_bench",
    "read_votes",
    "score_rows",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tpips_reward.evaluation' has no attribute {name!r}")
    return getattr(import_module(f"tpips_reward.evaluation.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
