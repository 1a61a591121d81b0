"""Aspect -> prompt -> token ids, one place for every fusion.

The wording, the chat turns and the order of image and text inside a turn decide the score: they are part of what a
checkpoint was trained on, so they live in one table (`PROMPTS`) and nowhere else.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from tpips_reward.errors import TPIPSError

#: The tokens of Qwen's chat format and of its images that the built-in tokenizers have; the padding first.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MAX_ASPECT_CHARACTERS = 4000
_CACHED_PROMPTS = 4096


@dataclass(frozen=True)
class PromptStyle:
    """How one fusion words an aspect and lays out the conversation."""

    with_aspect: str
    without_aspect: str
    system: str | None
    user: tuple[str, ...]  # the order of "text" and "image" inside the user's turn
    generation_prompt: bool


PROMPTS: dict[str, PromptStyle] = {
    "late": PromptStyle(
        with_aspect="Represent the similarity of the image based on {aspect}.",
        without_aspect="Represent the similarity of the image.",
        system="Represent the user's input.",
        user=("image", "text"),
        generation_prompt=True,
    ),
    "mid": PromptStyle(
        with_aspect="Represent the similarity of the image based on {aspect}.",
        without_aspect="Represent the similarity of the image.",
        system=None,
        user=("text", "image"),
        generation_prompt=False,
    ),
    "early": PromptStyle(
        with_aspect="Measure the similarity between the two images based on {aspect}.",
        without_aspect="Measure the similarity between the two images.",
        system=None,
        user=("text", "image", "image"),
        generation_prompt=False,
    ),
    "triplet": PromptStyle(
        with_aspect="I provide three horizontally concatenated images (left, middle, right). Which image is the most "
        "different among the three in terms of {aspect}? You need to choose: left, middle, right. Answer:",
        without_aspect="I provide three horizontally concatenated images (left, middle, right). Which image is the most "
        "different among the three? You need to choose: left, middle, right. Answer:",
        system=None,
        user=("image", "text"),
        generation_prompt=True,
    ),
}


def is_text(value: str) -> bool:
    """Whether a string is valid Unicode: broken escapes in JSON give lone surrogates, which no tokenizer takes."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def normalize_aspect(aspect: str | None) -> str | None:
    """Strip an aspect; None and "overall" (without case) become None: the prompt without an aspect.

    Raises:
        TPIPSError: the aspect is not a string, is empty or blank, or longer than `MAX_ASPECT_CHARACTERS`.
    """
    if aspect is None:
        return None
    if not isinstance(aspect, str):
        raise TPIPSError(
            f"An aspect must be a string such as 'lighting' (or None for overall similarity), got {aspect!r} "
            f"of type {type(aspect).__name__}."
        )
    stripped = aspect.strip()
    if not stripped:
        # most often a field that nobody filled in; the overall score would pass for its answer
        raise TPIPSError(f"The aspect {aspect!r} is empty; name what to compare, or give None or 'overall' for similarity as such.")
    if not is_text(stripped):
        raise TPIPSError(f"The aspect {stripped[:40]!r} holds a lone surrogate, which is no character; check its encoding.")
    if len(stripped) > MAX_ASPECT_CHARACTERS:
        raise TPIPSError(
            f"An aspect may have at most {MAX_ASPECT_CHARACTERS} characters, got {len(stripped)} "
            f"({stripped[:40]!r}…); shorten it to what is to be compared."
        )
    return None if stripped.lower() == "overall" else stripped


def prompt_text(fusion: str, aspect: str | None) -> str:
    """The sentence that `fusion` uses for `aspect` (paper, appendices B and C)."""
    style = PROMPTS[fusion]
    name = normalize_aspect(aspect)
    # replace, not format: an aspect may itself contain braces
    return style.without_aspect if name is None else style.with_aspect.replace("{aspect}", name)


def conversation(fusion: str, aspect: str | None) -> list[dict[str, Any]]:
    """The chat turns of `fusion` for `aspect`, in the form that `apply_chat_template` takes."""
    style = PROMPTS[fusion]
    parts = {"image": {"type": "image"}, "text": {"type": "text", "text": prompt_text(fusion, aspect)}}
    turns: list[dict[str, Any]] = [{"role": "user", "content": [parts[kind] for kind in style.user]}]
    if style.system is not None:
        turns.insert(0, {"role": "system", "content": [{"type": "text", "text": style.system}]})
    return turns


class PromptTokenizer:
    """Token ids of a fusion's conversations, each aspect tokenised once.

    Args:
        tokenizer: a transformers tokenizer whose vocabulary holds the chat and vision tokens.
        fusion: a key of `PROMPTS`.
        image_token_id: the id of the image placeholder.
        chat_template: overrides the tokenizer's own template.
    """

    def __init__(self, tokenizer: Any, fusion: str, image_token_id: int, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.fusion = fusion
        self.image_token_id = image_token_id
        self.chat_template = chat_template
        if chat_template is None and not getattr(tokenizer, "chat_template", None):
            raise TPIPSError(
                "The tokenizer has no chat template; pass chat_template, or keep chat_template.jinja beside it."
            )
        self._control = _control_strings(tokenizer)
        self._cache: OrderedDict[str | None, tuple[int, ...]] = OrderedDict()

    def full(self, aspect: str | None) -> tuple[int, ...]:
        """Ids of the whole conversation, with one placeholder an image.

        Raises:
            TPIPSError: a bad aspect (see `normalize_aspect`), or one that contains a control token such as <|im_end|>.
        """
        name = normalize_aspect(aspect)
        if name in self._cache:
            self._cache.move_to_end(name)
            return self._cache[name]
        self._refuse_control_tokens(name)
        text = self.tokenizer.apply_chat_template(
            conversation(self.fusion, name),
            tokenize=False,
            add_generation_prompt=PROMPTS[self.fusion].generation_prompt,
            **({} if self.chat_template is None else {"chat_template": self.chat_template}),
        )
        ids = tuple(self.tokenizer(text)["input_ids"])
        wanted = PROMPTS[self.fusion].user.count("image")
        if ids.count(self.image_token_id) != wanted:
            raise TPIPSError(
                f"The chat template gave {ids.count(self.image_token_id)} image placeholders "
                f"(id {self.image_token_id}) where {self.fusion} fusion needs {wanted}; the template, the tokenizer "
                "and config.image_token_id must belong together."
            )
        self._cache[name] = ids
        if len(self._cache) > _CACHED_PROMPTS:
            self._cache.popitem(last=False)
        return ids

    def _refuse_control_tokens(self, name: str | None) -> None:
        for token in self._control if name else ():
            if token in name:  # type: ignore[operator]
                raise TPIPSError(
                    f"The aspect {name[:80]!r} contains the control token {token!r}, "  # type: ignore[index]
                    "which would change the conversation; leave it out."
                )


class TextFirstPrompts(PromptTokenizer):
    """Mid and early fusion's prompts: the aspect stands before the images, which therefore see it.

    Args: see `PromptTokenizer`.

    Raises:
        TPIPSError: a chat template that puts an image before the text.
    """

    def __init__(self, tokenizer: Any, fusion: str, image_token_id: int, chat_template: str | None = None) -> None:
        super().__init__(tokenizer, fusion, image_token_id, chat_template)
        plain, probe = (ids[: ids.index(image_token_id)] for ids in (self.full(None), self.full("x")))
        if plain == probe:
            raise TPIPSError(
                f"The tokens before the image do not depend on the aspect; {fusion} fusion needs a chat template "
                "that keeps the text before the image."
            )

    def text(self, aspect: str | None) -> tuple[int, ...]:
        """Ids of the conversation without the image placeholders."""
        return tuple(token for token in self.full(aspect) if token != self.image_token_id)


class SplitPrompts(PromptTokenizer):
    """Prompts with the image first, cut where aspects begin to differ: a prefix that all share, and a suffix each.

    The prefix reaches past the image into the sentence ("Represent the similarity of the image"), so a suffix is only
    the aspect and the turn's closing tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        fusion: str,
        image_token_id: int,
        vision_end_token_id: int,
        chat_template: str | None = None,
    ) -> None:
        super().__init__(tokenizer, fusion, image_token_id, chat_template)
        plain, probe = self.full(None), self.full("x")
        if plain.count(vision_end_token_id) != 1:
            raise TPIPSError(
                f"The conversation holds the vision-end token (id {vision_end_token_id}) "
                f"{plain.count(vision_end_token_id)} times instead of once; config and tokenizer do not fit."
            )
        shared = next((k for k, (p, q) in enumerate(zip(plain, probe, strict=False)) if p != q), len(plain) - 1)
        self.prefix = plain[:shared]
        if vision_end_token_id not in self.prefix:
            raise TPIPSError(
                "The tokens before the image's end depend on the aspect; "
                f"{fusion} fusion needs a chat template that puts the image before the text."
            )

    def suffix(self, aspect: str | None) -> tuple[int, ...]:
        """Ids after the shared prefix for `aspect`; the last one is the read-out."""
        ids = self.full(aspect)
        if ids[: len(self.prefix)] != self.prefix or len(ids) == len(self.prefix):
            raise TPIPSError(f"The prompt of the aspect {aspect!r} does not begin with the tokens that all share.")
        return ids[len(self.prefix) :]


def _control_strings(tokenizer: Any) -> tuple[str, ...]:
    """Strings that the tokenizer would turn into a control token wherever they stand in a text."""
    special = set(tokenizer.all_special_tokens)
    special |= {token for token in tokenizer.get_added_vocab() if token.startswith("<")}
    return tuple(sorted(filter(None, special)))
