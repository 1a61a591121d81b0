"""Instruction -> kind of edit -> aspects, by rules for English; other languages fall back on the data set's category.

Rules are quick, free and repeatable, and they know only the words in `words`. What they propose is marked as proposed
wherever it is used, and goes to a file that people can correct (`store`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tpips_reward.aspects import words as w
from tpips_reward.aspects.taxonomy import KINDS, SUBJECT, Kind, kind_of_category
from tpips_reward.aspects.validation import MAX_ASPECTS, MAX_WORDS, check_phrase, check_proposed
from tpips_reward.errors import TPIPSError

#: What the rules can go by.
BASES = ("instruction", "category", "nothing")


@dataclass(frozen=True)
class Proposal:
    """Aspects for one edit.

    Attributes:
        kind: a key of `KINDS`; "complex" where the instruction asks for several edits.
        category: EDIR's category of that kind.
        target, preserve: aspects, most important first.
        by: "instruction", "category" (the data set's), or "nothing" where neither says what is asked; then the
            aspects are the general ones.
    """

    kind: str
    category: str
    target: tuple[str, ...]
    preserve: tuple[str, ...]
    by: str


#: All that stands politely before a clause, in one pass: texts may be long, and of strangers.
_POLITE = re.compile(
    r"(?:[ ,.!?]*(?:please|kindly|can you|could you|would you|i want (?:you )?to|i would like (?:you )?to|help me(?: to)?|let'?s"
    r"|now|then|also|and|finally|in the (?:image|picture|photo),?)\s)*[ ,.!?]*"
)
_VERBS = (
    "add|remove|delete|erase|replace|change|make|turn|convert|transform|move|paint|put|place|insert|swap|adjust|set|give|have|"
    "let|recolor|dye|blur|brighten|darken|rotate|zoom|increase|decrease|reduce|shift|resize|enlarge|shrink|raise|lower|apply"
)
_CLAUSES = re.compile(
    rf"[.;]\s+|,?\s+(?:and|then|while)\s+(?:also\s+|then\s+)?(?=(?:{_VERBS})\b)|,\s+(?=(?:{_VERBS})\b)"
)
_ATTRIBUTES = {
    "color": "color|colour|hue|tint", "material": "material", "shape": "shape|form", "texture": "texture|pattern",
    "size": "size|scale|height|width", "count": "number|count|quantity|amount",
    "spatial": "position|location|placement",
    "action": "pose|posture|expression|action|gesture",
    "lighting": "lighting|brightness|exposure|contrast|illumination",
    "style": "style", "weather": "weather",
}  # fmt: skip


def propose(instruction: str, category: str = "") -> Proposal:
    """Aspects to keep and to change for an instruction.

    Args:
        instruction: what was asked of the editor.
        category: what the data set calls this kind of edit, if it does; used where the instruction says nothing.
    """
    found = [item for item in map(_classify, _clauses(instruction)) if item is not None]
    named = kind_of_category(category)
    if found:
        return _proposal(list(dict.fromkeys(found)), "instruction")
    if named is not None and named.target:
        return _proposal([(named.name, SUBJECT)], "category")
    return _proposal([("appearance", SUBJECT)], "nothing")


def _clauses(instruction: str) -> list[str]:
    text = " ".join(instruction.lower().replace("’", "'").split()).strip(" .!?")
    parts = []
    for part in _CLAUSES.split(text):
        part = _POLITE.sub("", part.rstrip(" ,.!?"), count=1)
        if part:
            parts.append(part)
    return parts


def _classify(clause: str) -> tuple[str, str] | None:
    """(kind, thing) of one clause; None where no rule fits."""
    for rule in (_text_rule, _viewpoint_rule, _object_rule, _attribute_rule, _into_rule, _word_rule):
        found = rule(clause)
        if found is not None:
            return found
    return None


def _text_rule(clause: str) -> tuple[str, str] | None:
    quoted = re.search(r"[\"“”«»]|(?:^|\s)'[^']+'", clause)
    if re.search(w.TEXT, clause) and not re.search(r"^(?:remove|delete|erase|add|insert)\b", clause):
        return "text", "text"
    if quoted and re.match(r"(?:replace|change|translate|correct)\b", clause):
        return "text", "text"
    return None


def _viewpoint_rule(clause: str) -> tuple[str, str] | None:
    if re.match(r"(?:add|insert|remove|delete|erase|replace)\b", clause):
        return None  # "remove the camera" is no new viewpoint
    return ("viewpoint", SUBJECT) if re.search(w.VIEWPOINT, clause) else None


def _object_rule(clause: str) -> tuple[str, str] | None:
    """Verbs that say by themselves what happens to a thing."""
    match = re.match(r"(?:remove|delete|erase|eliminate|get rid of|take (?:away|out|off)|clear)\s+(.*)", clause)
    if match:
        return (
            ("background", SUBJECT)
            if re.match(rf"(?:the )?{w.BACKGROUND}", match[1])
            else ("remove", w.noun_phrase(match[1]))
        )
    if re.match(r"extract\b|cut out\b|isolate\b", clause):
        return "background", SUBJECT
    match = re.match(r"(?:replace|substitute|swap|exchange)\s+(.*)", clause)
    if match and not re.search(r"\bpositions?\b|\bplaces\b", clause):
        thing = re.split(r"\s(?:with|by|for)\s", match[1])[0]
        return ("background", SUBJECT) if re.search(w.BACKGROUND, thing) else ("replace", w.noun_phrase(thing))
    match = re.match(r"(?:add|insert|include|draw|give (?:him|her|it|them|the \w+)"
                     r"|(?:put|place)(?= (?:a|an|some|two|three)\b))\s+(.*)",
                     clause)  # fmt: skip
    if match:
        if re.match(r"(?:\w+ )?(?:more|another)\b", match[1]):
            return "count", w.noun_phrase(re.sub(r"^(?:\w+ )?(?:more|another)\s+", "", match[1]))
        return "addition", w.noun_phrase(match[1])
    match = re.search(
        r"\b(?:there|it|to|into|be|have|show)\s+(?:be |are |only |exactly )?" + w.NUMBERS + r"\s+(.*)", clause
    )
    if match:
        return "count", w.noun_phrase(match[1])
    if re.search(w.MOVES, clause):
        return "spatial", w.noun_phrase(re.sub(r"^\w+\s+(?:the (?:positions?|places) of\s+)?", "", clause))
    return None


def _attribute_rule(clause: str) -> tuple[str, str] | None:
    """An attribute by its name: "the color of the car", "the car's color", "the wall color"."""
    for kind, names in _ATTRIBUTES.items():
        match = re.search(rf"\b(?:{names})s? of (.*)", clause)
        if match:
            return kind, w.noun_phrase(match[1])
        match = re.search(rf"^\w+\s+(.*?)\s*\b(?:{names})\b", clause)
        if match and not re.search(r"\b(?:to|into|in|with)\b", match[1]):
            thing = w.owner(match[1]) if kind == "action" else w.noun_phrase(match[1])
            if kind in ("color", "texture") and re.fullmatch(w.BACKGROUND, thing):
                return "background", SUBJECT
            return kind, thing
    return None


def _into_rule(clause: str) -> tuple[str, str] | None:
    """ "Turn, make, change A (in)to B": B says what changes."""
    match = re.match(
        r"(?:turn|make|change|convert|transform|paint|dye|color|colour|recolor|transfer|render|set|redraw|modify|alter)\s+(.*)",
        clause,
    )
    if not match:
        return None
    rest = match[1]
    parts = re.split(r"\s(?:into|to be|to|from|as|in|look|like)\s", rest, maxsplit=1)
    thing, value = (parts[0], parts[1]) if len(parts) == 2 else (rest, rest)
    whole = w.noun_phrase(thing) == SUBJECT
    if re.search(w.STYLES, value):
        return "style", SUBJECT
    if re.search(w.BACKGROUND, thing):
        return "background", SUBJECT
    if re.search(w.LIGHTING, value) and whole:
        return "lighting", SUBJECT
    for kind, pattern in (("time", w.TIMES), ("weather", w.WEATHER)):
        if re.search(pattern, value) and (
            whole or re.search(r"\b(?:sky|weather|season|time|day|night|forest|tree)", thing)
        ):
            return kind, SUBJECT
    attributes = (
        ("size", w.SIZES), ("material", w.MATERIALS), ("color", w.COLORS), ("texture", w.TEXTURES), ("shape", w.SHAPES),
        ("action", w.ACTIONS), ("lighting", w.LIGHTING),
    )  # fmt: skip
    if len(parts) == 1:
        return _at_the_end(rest, attributes)
    if re.search(r"\b(?:shade|tint|hue|colou?r)\b", value):
        return "color", w.noun_phrase(thing)
    for kind, pattern in attributes:
        if re.search(pattern, value) and not (kind == "color" and _is_thing(value)):
            return kind, w.noun_phrase(thing)
    if not whole:
        return ("background", SUBJECT) if re.search(w.BACKGROUND, value) else ("replace", w.noun_phrase(thing))
    return None


def _at_the_end(text: str, attributes: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """ "The circle a square", "the car bright red", "the table out of marble": the last word that says what changes;
    what stands before it is the thing ("the red circle larger" is about the size)."""
    found = []
    for kind, pattern in attributes:
        matches = [match for match in re.finditer(pattern, text) if match.start() > 0]
        if matches:
            found.append((matches[-1].end(), kind, text[: matches[-1].start()]))
    if not found:
        return None
    _, kind, head = max(found)
    head = re.sub(
        r"\b(?:a|an|bright|dark|light|deep|pale|much|slightly|more|out of|of|made|look|be)\s*$", "", head.strip()
    )
    return kind, w.noun_phrase(head)


def _word_rule(clause: str) -> tuple[str, str] | None:
    """Single words, where nothing else fits."""
    body = re.sub(r"^\w+\s+", "", clause)
    if re.search(w.STYLES, clause):
        return "style", SUBJECT
    if re.search(w.BACKGROUND, clause):
        return "background", SUBJECT
    for kind, pattern in (("weather", w.WEATHER), ("time", w.TIMES)):
        if re.search(pattern, clause):
            return kind, SUBJECT
    if re.search(w.SIZES, clause):
        return "size", w.noun_phrase(body)
    if re.match(w.ACTIONS, clause) or re.match(r"(?:make|let|have)\b.*" + w.ACTIONS, clause):
        return "action", w.owner(body)
    if re.search(w.LIGHTING, clause):
        return "lighting", SUBJECT
    return None


def _is_thing(value: str) -> bool:
    """ "a red sports car" is a thing, "a red tone" and "bright red" are colors."""
    match = re.match(r"(?:an?|the)\s+(.*)", value)
    if not match:
        return False
    rest = re.sub(w.COLORS, " ", match[1])
    rest = re.sub(
        r"\b(?:darker|lighter|brighter|dark|light|bright|deep|pale|soft|vivid|solid|tone|of|and|with|warm|cool)\b",
        "",
        rest,
    )
    return bool(re.search(r"[a-z]{3,}", rest))


def _proposal(found: Sequence[tuple[str, str]], by: str) -> Proposal:
    """Aspects of one or several edits; what one of them changes, none of them asks to keep."""
    parts = [(KINDS[name], _short(thing)) for name, thing in found]
    target = list(dict.fromkeys(text.format(o=thing) for kind, thing in parts for text in kind.target))
    preserve = [
        aspect
        for index, (kind, thing) in enumerate(parts)
        for aspect in (text.format(o=thing) for text in kind.preserve)
        if aspect not in target and not any(_touches(other, aspect) for j, other in enumerate(parts) if j != index)
    ]
    target = target[: MAX_ASPECTS // 2]
    preserve = list(dict.fromkeys(preserve))[: MAX_ASPECTS - len(target)]
    several = len({(kind.name, thing) for kind, thing in parts}) > 1
    name = "complex" if several else parts[0][0].name
    kept, changed = check_proposed(preserve or [f"{SUBJECT} identity"], target)
    return Proposal(name, KINDS[name].category, changed, kept, by)


def _touches(part: tuple[Kind, str], aspect: str) -> bool:
    kind, thing = part
    if aspect.split()[-1] in kind.affects or aspect in [text.format(o=thing) for text in kind.target]:
        return True
    return kind.name in ("remove", "replace", "addition") and aspect.startswith(f"{thing} ")


def _short(thing: str) -> str:
    """A thing that fits into an aspect; the main subject where it does not."""
    try:
        check_phrase(thing)
    except TPIPSError:
        return SUBJECT
    return thing if len(thing.split()) < MAX_WORDS and len(thing) <= 40 else SUBJECT
