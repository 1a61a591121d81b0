"""The vocabulary of the rules, and how a noun is found in an instruction."""

from __future__ import annotations

import re

from tpips_reward.aspects.taxonomy import SUBJECT


def _any(words: str) -> str:
    return r"\b(?:" + "|".join(words.split()) + r")\b"


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


COLORS = _any(
    "red orange yellow green blue purple violet pink brown black white gr[ae]y gold golden silver "
    "beige teal turquoise cyan "
    "magenta maroon navy crimson lavender tan cream ivory olive scarlet indigo amber burgundy blonde? colou?rful"
)
MATERIALS = _any(
    "wood wooden metal metallic glass marble stone brick leather plastic ceramic fabric velvet silk "
    "bronze copper concrete "
    "crystal wool woolen denim clay steel iron rubber porcelain granite bamboo chrome lego ice"
)
TEXTURES = _any(
    "smooth rough furry fluffy striped stripes polka plaid checkered patterned floral glossy matte "
    "wrinkled dotted knitted "
    "shiny scaly spotted"
)
SHAPES = _any(
    "round square circular oval triangular rectangular hexagonal spherical cubic heart-shaped "
    "star-shaped circle triangle "
    "star cross arrow cube sphere heart"
)
STYLES = (
    r"\b(?:style|styled|stylized|water-?colou?r|oil "
             "painting|pencil|sketch|cartoon|anime|manga|pixel art|ghibli|comic|"
    r"cyberpunk|steampunk|impressionis\w+|cubis\w+|ukiyo-e|line drawing|charcoal|mosaic|graffiti|origami|3d render|"
    r"low.poly|claymation|vintage photo\w*|sepia|black.and.white photo\w*|painting|illustration)\b"
)
WEATHER = _any("weather rain rainy raining snow snowy snowing fog foggy sunny cloudy storm stormy mist misty windy "
               "thunderstorm overcast blizzard hail")  # fmt: skip
TIMES = (
    _any("night nighttime daytime sunset sunrise dusk dawn noon evening morning midnight spring "
             "summer autumn winter season "
         "nightfall twilight afternoon") + r"|\b(?:golden hour|time of day)\b"
)  # fmt: skip
LIGHTING = _any("lighting light brightness brighter darker brighten darken exposure contrast shadows? illuminat\\w+ "
                "relight saturation vibran\\w+ hdr tone warmer cooler neon-lit")  # fmt: skip
SIZES = _any("larger bigger smaller taller shorter wider thinner narrower enlarge shrink resize "
             "huge giant tiny slimmer "
             "thicker longer fatter")  # fmt: skip
VIEWPOINT = (
    r"\b(?:viewpoint|camera|perspective|zoom|close-?up|bird'?s.eye|top-down|aerial view|side "
             "view|front view|rear view|"
    r"low.angle|high.angle|view from|view of it from|fisheye|wide.angle|viewing angle|rotate the (?:view|image))\b"
)
BACKGROUND = _any("background backdrop scenery surroundings? environment setting landscape wallpaper")
TEXT = _any("text word words letter letters caption title slogan logo lettering inscription font headline subtitle "
            "watermark") + r"|\b(?:sign|label) (?:says?|reads?|to (?:say|read))\b"  # fmt: skip
ACTIONS = _any(
    "sit sitting stand standing jump jumping run running walk walking smile smiling wave waving "
    "raise lower lift dance "
    "dancing sleep sleeping lie lying open close look looking pose posing fly flying kneel kneeling "
    "laugh laughing cry frown "
    "crouch hug point bend stretch turn tilt nod wink hold holding eat eating drink drinking "
    "expression gesture swim swimming"
)
MOVES = r"^(?:move|shift|relocate|reposition|slide|drag|swap|put|place|bring|center|align)\b"
NUMBERS = _any("one two three four five six seven eight nine ten several many more fewer another \\d+")

_DETERMINERS = _set(
    "the a an this that these those his her its their my your our all some any both each every of single"
)
_STOPS = _set(
    "to into with from in on at by for so that which who whose wearing holding standing sitting and "
    "or while near beside "
    "behind under above as is are be appear look looks looking more less than using around inside "
    "of over through up down "
    "left right larger bigger smaller taller shorter wider thinner darker brighter lighter until "
    "but if has have was were "
    "there out away onto next between across against along towards toward instead being made "
    "walking running lying located "
    "visible worn shown held carried"
)
_WHOLE = _set("image picture photo photograph scene painting whole entire everything view it him "
             "her them he she they")


def noun_phrase(text: str) -> str:
    """The thing that a piece of an instruction starts with, at most two words: "the old red car on the left" -> "old
    car".

    :data:`SUBJECT` where it names nothing, or the image as a whole.
    """
    words: list[str] = []
    for word in re.findall(r"[a-z0-9’'-]+|[^\sa-z0-9’'-]", text.lower()):
        if word in _DETERMINERS and not words:
            continue
        if word in _STOPS or word in _DETERMINERS or not word[0].isalnum():
            break
        words.append(word)
    for position, word in enumerate(words):
        if re.search(r"['’]s?$", word) and position + 1 < len(words):
            words = words[position + 1 :]  # "the woman's dress": the dress
            break
    words = [re.sub(r"['’]s?$", "", word).strip("-'’") for word in words]
    words = [word for word in words if word and word not in _WHOLE and not re.fullmatch(COLORS, word)]
    words = [word for word in words if word not in ("and", "or", "not")]
    return " ".join(words[-2:]) or SUBJECT


def owner(text: str) -> str:
    """Whose it is: "the person's left arm" -> "person"; otherwise as `noun_phrase`."""
    found = re.match(r"\s*((?:[a-z0-9-]+\s+)*?[a-z0-9-]+)['’]s?\s", text.lower())
    return noun_phrase(found.group(1)) if found else noun_phrase(text)
