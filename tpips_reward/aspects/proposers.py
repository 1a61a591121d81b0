"""One interface for everything that proposes aspects: rules, a local vision-language model, an endpoint.

| name | what answers |
|---|---|
| rules | `rules.propose`: quick, free, English |
| vlm:SOURCE | a vision-language model of transformers on this machine, a Hub id or a folder |
| endpoint:MODEL@URL | an OpenAI-compatible server, such as vLLM's: endpoint:Qwen/Qwen3-VL-8B@http://localhost:8000/v1 |

A model sees the source and the instruction, and answers under the refinement rules of the TPIPS paper (appendix A):
single short noun phrases without "and", "or", "not" and symbols, five to ten, most important first. What breaks them is
asked for again, with the mistake named; an answer is never mended into something that the model did not say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tpips_reward.aspects.rules import Proposal, propose
from tpips_reward.aspects.validation import MAX_ASPECTS, check_phrase, check_proposed
from tpips_reward.chat import Refused
from tpips_reward.errors import TPIPSError

if TYPE_CHECKING:
    from PIL.Image import Image

MIN_ASPECTS = 5
#: Aspects to change, at most: what one instruction asks for.
MAX_TARGET = 3
RULES = "rules"

PROMPT = """\
An image editor gets the image above and this instruction:
{instruction}

Name visual aspects of the image, in two lists: those that the instruction asks to change, and those that a careful editor \
leaves as they are.

Rules:
1. Each aspect is a single, short noun phrase that fits this image, such as "cat pose", "sky brightness" or "table material".
2. None holds the words "and", "or", "not", a comma, brackets or any other symbol.
3. CHANGE has one to {most} aspects. Both lists together have {low} to {high}; no aspect is in both.
4. Think of color, material, texture, shape, size, pose, position, background, lighting, camera viewpoint and image style, \
and of who or what is shown; name only what can be seen.
5. The most important aspect of a list comes first.

Answer with the two lists and nothing else:
CHANGE
1. ...
KEEP
1. ..."""
RETRY = "\n\nYour last answer could not be used: {why} Answer again, under the same rules."


class ProposalError(TPIPSError):
    """A model's answers that hold no aspects under the rules, after all attempts."""


@dataclass(frozen=True)
class Request:
    """One edit for which aspects are wanted.

    Attributes:
        instruction: what is asked of the editor.
        category: what the data set calls this kind of edit, if it does.
        image: the source, RGB; None where the proposer needs none.
    """

    instruction: str
    category: str = ""
    image: Image | None = None


class Proposer(Protocol):
    """Proposes aspects; `name` tells proposers apart in files and reports."""

    name: str
    needs_image: bool

    def __call__(self, request: Request) -> Proposal:
        """Aspects for one edit.

        Raises:
            ProposalError: no usable answer for this edit; the next one may have one.
            TPIPSError: the proposer itself does not work.
        """
        ...


class RuleProposer:
    """`rules.propose` behind the interface."""

    name = RULES
    needs_image = False

    def __call__(self, request: Request) -> Proposal:
        return propose(request.instruction, request.category)


#: (question, image) -> the model's answer.
Ask = Callable[[str, "Image | None"], str]


class ModelProposer:
    """Aspects from whatever answers a question about an image.

    Args:
        name: such as "vlm:Qwen/Qwen3-VL-8B-Instruct".
        ask: the model.
        attempts: questions for one edit, at most; from the second on the mistake is named.
    """

    needs_image = True

    def __init__(self, name: str, ask: Ask, attempts: int = 3) -> None:
        if attempts < 1:
            raise TPIPSError(f"attempts is {attempts}; give 1 or more.")
        self.name, self.ask, self.attempts = name, ask, attempts

    def __call__(self, request: Request) -> Proposal:
        question = PROMPT.format(instruction=" ".join(request.instruction.split()) or "(none)", most=MAX_TARGET,
                                 low=MIN_ASPECTS, high=MAX_ASPECTS)  # fmt: skip
        why = ""
        for _ in range(self.attempts):
            try:
                answer = self.ask(question + (RETRY.format(why=why) if why else ""), request.image)
            except Refused as error:  # of this edit: a filter, an image that is too large
                raise ProposalError(str(error)) from None
            try:
                target, preserve = parse_answer(answer)
            except TPIPSError as error:
                why = str(error)
                continue
            kind = propose(request.instruction, request.category)
            return Proposal(kind.kind, kind.category, target, preserve, self.name)
        raise ProposalError(f"{self.name} gave no usable aspects in {self.attempts} answers; the last: {why}")


_LIST_HEAD = re.compile(r"[\W\d_]*(change|keep)[\W_]*", re.IGNORECASE)
_ITEM = re.compile(r"\s*(?:\d{1,2}\s*[.)]|[-*\u2022])\s*(.+)")


def parse_answer(answer: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A model's two lists -> (aspects to change, aspects to keep), most important first.

    Marks around an aspect (bold, quotes, a full stop) are taken off. Reasoning before "</think>" is skipped.

    Raises:
        TPIPSError: a list is missing, an aspect breaks the rules or is named twice, or there are too few or too many.
    """
    lists: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in answer.rpartition("</think>")[2].splitlines():
        head = _LIST_HEAD.fullmatch(line)
        if head:
            current = lists.setdefault(head[1].lower(), [])
            continue
        item = _ITEM.fullmatch(line)
        if item and current is not None:
            current.append(item[1].strip().strip("*_`\"'“”[]. ").strip())
    for name in ("change", "keep"):
        if not lists.get(name):
            raise TPIPSError(f"there is no list {name.upper()} with numbered aspects.")
    return _checked(lists["change"], lists["keep"])


def _checked(target: Sequence[str], preserve: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    for aspect in (*target, *preserve):
        check_phrase(aspect)
    if len(target) > MAX_TARGET:
        raise TPIPSError(f"CHANGE has {len(target)} aspects, but at most {MAX_TARGET} are wanted.")
    if not MIN_ASPECTS <= len(target) + len(preserve):
        raise TPIPSError(f"there are {len(target) + len(preserve)} aspects, but at least {MIN_ASPECTS} are wanted.")
    kept, changed = check_proposed(preserve, target)
    return changed, kept


@dataclass(frozen=True)
class ProposerSource:
    """Makes a proposer; its name is known before, so that nothing is loaded where all of its proposals are."""

    name: str
    make: Callable[[], Proposer]

    def __call__(self) -> Proposer:
        """The proposer."""
        return self.make()


def parse_proposer(text: str) -> ProposerSource:
    """What makes the proposer of a name in the table above; a model is loaded when it is called, and not before.

    Raises:
        TPIPSError: no such proposer, or an address that is none.
    """
    kind, _, rest = text.strip().partition(":")
    if text.strip() == RULES:
        return ProposerSource(RULES, RuleProposer)
    if kind == "vlm" and rest:
        def load() -> Proposer:
            from tpips_reward.aspects.vlm import VisionLanguageModel

            return ModelProposer(text.strip(), VisionLanguageModel(rest).ask)

        return ProposerSource(text.strip(), load)
    if kind == "endpoint":
        model, _, url = rest.rpartition("@")
        from tpips_reward.chat import ChatClient

        client = ChatClient(url, model)
        # the address is left out of the name: the same model elsewhere answers the same
        name = f"endpoint:{model}"
        return ProposerSource(name, lambda: ModelProposer(name, client.ask))
    raise TPIPSError(
        f"There is no proposer {text!r}; write rules, vlm:SOURCE or endpoint:MODEL@URL, such as "
        "endpoint:Qwen/Qwen3-VL-8B-Instruct@http://localhost:8000/v1."
    )
