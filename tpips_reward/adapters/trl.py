"""TRL: a function for `reward_funcs`, `(prompts, completions, **columns) -> list[float]`.

TRL's completions are text or messages. An edit is an image in the last message, or what `to_image` makes of a completion
(a drawing program run, a tool's output fetched ...).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tpips_reward.adapters.core import EditScorer, RewardCall
from tpips_reward.errors import TPIPSError


class TRLReward:
    """A reward function of TRL.

    Args:
        reward: a `TPIPSReward` or a `RemoteReward`.
        source_column: the column of the data set with the source images; one of several in a list is its first.
        to_image: (completion, source) -> the edit; None takes the last image of the completion's messages.
        preserve, target: aspects of rows without columns `preserve` and `target`; empty lets rules propose them.
    """

    def __init__(
        self,
        reward: RewardCall,
        source_column: str = "image",
        to_image: Callable[[Any, Any], Any] | None = None,
        preserve: Sequence[str] = (),
        target: Sequence[str] = (),
    ) -> None:
        self.scorer = EditScorer(reward, preserve, target)
        self.source_column = source_column
        self.to_image = to_image or last_image
        self.__name__ = "tpips_reward"  # TRL logs by it

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """One float a completion, in order.

        Raises:
            TPIPSError: the column with the sources is missing, a column with more or fewer entries than there are completions, a
                completion without an image, whatever the reward raises.
        """
        if self.source_column not in columns:
            raise TPIPSError(
                f"The data set has no column {self.source_column!r} with the source images; it has "
                f"{', '.join(sorted(columns)) or 'none'}. Name it with source_column=."
            )
        own: dict[str, Any] = {name: columns[name] for name in ("preserve", "target") if name in columns}
        for name, column in {"prompts": prompts, self.source_column: columns[self.source_column], **own}.items():
            if len(column) != len(completions):
                raise TPIPSError(f"{name} has {len(column)} entries for {len(completions)} completions; give one each.")
        sources = [s[0] if isinstance(s, (list, tuple)) and s else s for s in columns[self.source_column]]
        edits = [self.to_image(completion, source) for completion, source in zip(completions, sources, strict=True)]
        metadata = [{name: column[index] for name, column in own.items()} for index in range(len(edits))]
        output = self.scorer(edits, sources, [text_of(prompt) for prompt in prompts], metadata)
        if "log_metric" in columns:
            for name, values in output.terms.items():
                if not bool(values.isnan().all()):
                    columns["log_metric"](f"tpips/{name}", float(values.nanmean()))
        return output.scores.tolist()


def last_image(completion: Any, source: Any = None) -> Any:
    """The completion itself where it is an image; otherwise the last image in its messages.

    Raises:
        TPIPSError: there is none.
    """
    if not isinstance(completion, (str, list, tuple)):
        return completion
    messages = completion if not isinstance(completion, str) else []
    for message in reversed(messages):
        content = message.get("content") if isinstance(message, dict) else None
        for part in reversed(content if isinstance(content, list) else []):
            if isinstance(part, dict) and part.get("type") == "image" and part.get("image") is not None:
                return part["image"]
    raise TPIPSError("A completion holds no image; give to_image= that makes the edit of it.")


def text_of(prompt: Any) -> str:
    """The text of a prompt: itself, or the text of the last user's message."""
    if isinstance(prompt, str):
        return prompt
    for message in reversed(prompt):
        if message.get("role") == "user":
            content = message["content"]
            if isinstance(content, str):
                return content
            return " ".join(part.get("text") or "" for part in content if part.get("type") == "text").strip()
    return ""
