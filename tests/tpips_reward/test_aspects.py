"""Proposed aspects: the taxonomy, the rules on real kinds of instructions, and the file that people correct."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from tpips_reward.aspects import CATEGORIES, KINDS, Entry, check_proposed, propose, read_entries, write_entries
from tpips_reward.aspects.taxonomy import kind_of_category
from tpips_reward.errors import TPIPSError
from tpips_reward.scenes import EDIT_KINDS, sample_edit


def test_the_taxonomy_has_edirs_five_categories_and_fifteen_kinds():
    edir = Counter(kind.category for kind in KINDS.values() if kind.edir)
    assert edir == {"attribute": 4, "object": 4, "relationship": 3, "global environment": 3, "complex": 1}
    assert tuple(edir) == CATEGORIES and sum(edir.values()) == 15


@pytest.mark.parametrize(
    ("instruction", "kind", "target"),
    [
        ("Make the car red", "color", "car color"),
        ("Please change the color of the old house to a light blue.", "color", "old house color"),
        ("Change the wall color to a soft beige.", "color", "wall color"),
        ("Change the skin to a lighter shade.", "color", "skin color"),
        ("make the table out of marble", "material", "table material"),
        ("Turn the circle into a square", "shape", "circle shape"),
        ("Change the tortoise's shell texture to a smooth surface.", "texture", "shell texture"),
        ("make the cup larger", "size", "cup size"),
        ("Add an elegant chandelier in the center of the ceiling.", "addition", "elegant chandelier presence"),
        ("Give the man a hat", "addition", "hat presence"),
        ('Remove the red trolley (marked "77") from the railway track.', "remove", "trolley presence"),
        ("Replace the deer in the image with a lion", "replace", "deer identity"),
        ("Change the dress to a red sports car", "replace", "dress identity"),
        ("Add two more cats", "count", "cats count"),
        ("Move the star to the left", "spatial", "star position"),
        ("Swap the positions of the cup and the plate", "spatial", "cup position"),
        ("Raise the person's right arm.", "action", "person pose"),
        ("make the dog smile", "action", "dog pose"),
        ("Zoom in on the cat", "viewpoint", "camera viewpoint"),
        ("Transfer the image into a traditional ukiyo-e woodblock-print style.", "style", "image style"),
        ("Turn the photo into a watercolor painting", "style", "image style"),
        ("make it night", "time", "time of day"),
        ("Change the forest in the picture from autumn to spring.", "time", "time of day"),
        ("make it rain", "weather", "weather"),
        ("Change the background to a beach", "background", "background"),
        ("Remove the background", "background", "background"),
        ("Brighten the photo", "lighting", "lighting"),
        ("Replace the text 'HELLO' with 'BYE'", "text", "text content"),
    ],
)
def test_instructions(instruction, kind, target):
    proposal = propose(instruction)
    assert (proposal.kind, proposal.target[0], proposal.by) == (kind, target, "instruction")
    assert proposal.category == KINDS[kind].category
    assert not set(proposal.target) & set(proposal.preserve) and len(proposal.preserve) >= 4


def test_several_edits_are_complex_and_keep_nothing_that_one_of_them_changes():
    proposal = propose("Remove the gift box held by the woman, and adjust the lighting to brighten the scene.")
    assert proposal.kind == "complex" and proposal.target == ("gift box presence", "lighting")
    assert not {"lighting", "background"} & set(proposal.preserve)
    styled = propose("Make the cup blue and turn the photo into an oil painting")
    assert styled.target == ("cup color", "image style") and "cup shape" in styled.preserve
    assert not any(aspect.endswith(("style", "texture", "lighting", "background")) for aspect in styled.preserve)


@pytest.mark.parametrize(
    ("instruction", "category", "kind", "by"),
    [
        ("将汽车改为红色", "color_alter", "color", "category"),
        ("将背景改为海滩", "background_change", "background", "category"),
        ("", "subject-add", "addition", "category"),
        ("What if?", "", "appearance", "nothing"),
        ("What if?", "hybrid", "appearance", "nothing"),
        ("make the cup blue", "style", "color", "instruction"),
    ],
)
def test_the_data_sets_category_helps_where_the_instruction_does_not(instruction, category, kind, by):
    proposal = propose(instruction, category)
    assert (proposal.kind, proposal.by) == (kind, by)


def test_categories_of_the_benchmarks():
    for name, kind in [("ps_human", "action"), ("tone_transfer", "lighting"), ("extract", "background"),
                       ("alter", "appearance"), ("motion_change", "action"), ("nothing", None)]:  # fmt: skip
        found = kind_of_category(name)
        assert (found.name if found else None) == kind


def test_procedural_instructions_are_recognised():
    wanted = {"color": "color", "shape": "shape", "size": "size", "position": "spatial",
              "background_color": "background", "background_brightness": "background"}  # fmt: skip
    rng = np.random.default_rng(0)
    missed = []
    for index in range(120):
        edit = sample_edit(rng, kind=EDIT_KINDS[index % len(EDIT_KINDS)])
        proposal = propose(edit.instruction)
        # "replace the circle with an arrow" is a replacement in anybody's words
        if proposal.kind != wanted[edit.kind] and not (edit.kind == "shape" and proposal.kind == "replace"):
            missed.append((edit.instruction, proposal.kind))
    assert not missed


def test_whatever_is_proposed_obeys_the_papers_rules():
    things = ["car", "man's and woman's hats, ties", "$$$", "x" * 200, "a b c d e f g h", "or not", "the", "ünïcode 犬"]
    verbs = ["make the {} red", "remove {}", "replace {} with a dog", "move {} up", "add {}", "the color of {}", "{}"]
    for verb in verbs:
        for thing in things:
            proposal = propose(verb.format(thing))
            check_proposed(proposal.preserve, proposal.target)
            assert 5 <= len(proposal.preserve) + len(proposal.target) <= 10


@pytest.mark.parametrize(
    ("preserve", "target", "message"),
    [
        (["car and house"], [], "'and'"),
        (["color (car)"], [], r"'\('"),
        (["a b c d e f g"], [], "too long"),
        (["car", "Car"], [], "twice"),
        (["car"], ["car"], "both"),
        ([""], ["car"], "empty aspect"),
        ([], [], "at least one"),
        ([f"thing {letter}" for letter in "abcdefghijk"], [], "11 aspects are too many"),
    ],
)
def test_aspects_that_break_the_rules(preserve, target, message):
    with pytest.raises(TPIPSError, match=message):
        check_proposed(preserve, target)


# --- the file


def test_entries_go_to_the_file_and_back(tmp_path):
    path = tmp_path / "aspects.jsonl"
    entries = {"1": Entry("make it ünï", "color", ("car color",), ("background",))}
    entries["2"] = Entry("", "", ("weather",), ())
    entries["3"] = Entry("x", "", ("weather",), (), "rules", "00000000", "nothing")
    assert read_entries(path) == {}
    write_entries(path, entries)
    assert read_entries(path) == entries and "ünï" in path.read_text(encoding="utf-8")
    path.write_text(path.read_text(encoding="utf-8").replace('"nothing"', '"magic"'), encoding="utf-8")
    assert read_entries(path)["3"].by == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": ["car color."]}, "line 2: The aspect 'car color.' holds"),
        ({"target": "car color"}, "line 2: \"target\" is 'car color'"),
        ({"key": 3}, 'line 2: "key" is 3'),
        ({"key": "1"}, "line 2: the key '1' is there twice"),
        ({"preserve": [], "target": []}, "line 2: No aspects"),
        ({"source": "1.png"}, "line 2: 'source' is no field of an entry"),
        ({"outputs": {}}, "and would be lost; is this a file of aspects"),
    ],
)
def test_mistakes_in_the_file_are_named_by_line(tmp_path, change, message):
    good = {"key": "1", "instruction": "x", "kind": "", "target": ["car color"], "preserve": ["background"]}
    path = tmp_path / "aspects.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps({**good, "key": "2", **change}) + "\n")
    with pytest.raises(TPIPSError, match=message):
        read_entries(path)
    path.write_text("{nothing\n")
    with pytest.raises(TPIPSError, match="line 1: no JSON"):
        read_entries(path)


def test_all_mistakes_in_the_file_are_named(tmp_path):
    path = tmp_path / "aspects.jsonl"
    good = {"key": "1", "instruction": "x", "target": ["car color"], "preserve": ["background"]}
    path.write_text("{nothing\n" + json.dumps(good) + "\n[]\n" + json.dumps({**good, "key": "2", "target": ["a, b"]}) + "\n")
    with pytest.raises(TPIPSError, match=r"aspects.jsonl, line 1: no JSON.* line 3: an entry is .* line 4: The aspect 'a, b'"):
        read_entries(path)
    path.write_text("[]\n" * 23)
    with pytest.raises(TPIPSError, match="line 20: an entry is an object, {...}. There are 3 more."):
        read_entries(path)
