"""Kinds of edits, and what each changes and leaves alone.

The categories and the kinds marked `edir` are those of EDIR (arXiv 2601.16125): five categories, fifteen kinds. The
other kinds are what editing benchmarks ask for besides; each has the EDIR category that it is nearest to.
"""

from __future__ import annotations

from dataclasses import dataclass

CATEGORIES = ("attribute", "object", "relationship", "global environment", "complex")
#: Stands for the thing that is edited where the instruction does not name it.
SUBJECT = "main subject"


@dataclass(frozen=True)
class Kind:
    """One kind of edit.

    Attributes:
        name: such as "color".
        category: one of :data:`CATEGORIES`.
        target, preserve: aspects, most important first; "{o}" is the thing that is edited.
        affects: last words of aspects that this edit may change on its way; a second edit in the same instruction
            does not ask to preserve them.
        hints: what benchmarks call it.
        edir: whether EDIR has it.
    """

    name: str
    category: str
    target: tuple[str, ...]
    preserve: tuple[str, ...]
    affects: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    edir: bool = True


_SCENE = ("background", "lighting", "camera viewpoint", "image style")
_SUBJECT = (f"{SUBJECT} identity", f"{SUBJECT} pose", "object arrangement")

_ALL = (
    Kind("color", "attribute", ("{o} color",), ("{o} shape", "{o} texture", "{o} position", *_SCENE),
         hints=("color alter", "color change", "color", "colour", "recolor")),
    Kind("material", "attribute", ("{o} material",), ("{o} shape", "{o} size", "{o} position", *_SCENE),
         ("color", "texture"), ("material alter", "material change", "material")),
    Kind("shape", "attribute", ("{o} shape",), ("{o} color", "{o} texture", "{o} position", *_SCENE), ("size",),
         ("shape", "shape change")),
    Kind("texture", "attribute", ("{o} texture",), ("{o} shape", "{o} size", "{o} position", *_SCENE), ("color",),
         ("texture", "texture change")),
    Kind("size", "attribute", ("{o} size",), ("{o} color", "{o} shape", "{o} texture", *_SCENE), ("position",),
         ("size", "size change", "size adjustment"), edir=False),
    Kind("text", "attribute", ("text content",), ("text font", "text color", "text position", *_SCENE), (),
         ("text change", "text editing", "text", "text edit", "in image text translation"), edir=False),
    Kind("addition", "object", ("{o} presence",), (f"{SUBJECT} identity", *_SCENE, "object arrangement"), (),
         ("subject add", "subject addition", "add", "addition", "object addition", "object add")),
    Kind("remove", "object", ("{o} presence",), (*_SCENE, "object arrangement"), (),
         ("subject remove", "subject removal", "remove", "removal", "object removal", "object remove")),
    Kind("replace", "object", ("{o} identity",), ("{o} position", *_SCENE, "object arrangement"), ("pose",),
         ("subject replace", "subject replacement", "replace", "replacement", "object replacement", "object replace")),
    Kind("count", "object", ("{o} count",), ("{o} color", "{o} shape", *_SCENE), ("position", "arrangement"),
         ("count", "counting", "count change", "quantity")),
    Kind("spatial", "relationship", ("{o} position",), ("{o} color", "{o} shape", "{o} size", *_SCENE),
         ("arrangement", "pose"), ("spatial", "position change", "position", "move", "object move", "relation change")),
    Kind("action", "relationship", ("{o} pose",), ("{o} identity", "{o} color", "{o} position", *_SCENE), ("shape",),
         ("motion change", "action", "pose", "motion", "pose change", "ps human", "expression")),
    Kind("viewpoint", "relationship", ("camera viewpoint",),
         (f"{SUBJECT} identity", f"{SUBJECT} color", f"{SUBJECT} texture", "lighting", "image style"),
         ("background", "position", "pose", "size", "shape", "arrangement"), ("viewpoint", "camera", "view change",
         "camera motion", "novel view")),
    Kind("style", "global environment", ("image style",), (*_SUBJECT, "scene content", "camera viewpoint"),
         ("color", "texture", "material", "lighting", "background"), ("style change", "style", "style transfer")),
    Kind("time", "global environment", ("time of day",),
         (*_SUBJECT, f"{SUBJECT} shape", "camera viewpoint", "image style"),
         ("color", "lighting", "background"), ("time", "time change", "season")),
    Kind("weather", "global environment", ("weather",),
         (*_SUBJECT, f"{SUBJECT} shape", "camera viewpoint", "image style"),
         ("color", "lighting", "background"), ("weather", "weather change")),
    Kind("background", "global environment", ("background",),
         (f"{SUBJECT} identity", f"{SUBJECT} color", f"{SUBJECT} shape", f"{SUBJECT} pose", f"{SUBJECT} size",
          "image style"),
         ("lighting", "arrangement", "content"), ("background change", "background", "extract",
         "background replacement",
         "subject extraction", "subject extract"), edir=False),
    Kind("lighting", "global environment", ("lighting",),
         (*_SUBJECT, f"{SUBJECT} shape", "camera viewpoint", "image style"),
         ("color", "background"), ("tone transfer", "tone transformation", "lighting", "relighting", "tone"),
         edir=False),
    Kind("appearance", "attribute", ("{o} appearance",), ("background", "lighting", "object arrangement",
         "camera viewpoint", "image style"), ("color", "texture", "shape"), ("alter", "adjust", "ps human beauty",
         "attribute"), edir=False),
    Kind("complex", "complex", (), (), (), ("complex", "compose", "hybrid", "multiple")),
)  # fmt: skip

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}


def kind_of_category(category: str) -> Kind | None:
    """The kind that a benchmark's category names ("subject-add", "color_alter", "style"); None where it names none."""
    words = " ".join(category.lower().replace("_", " ").replace("-", " ").split())
    return next((kind for kind in _ALL if words == kind.name or words in kind.hints), None)
