"""Aspects, prompts and their token ids."""

from __future__ import annotations

import pytest
from PIL import Image

from tpips_reward.errors import TPIPSError
from tpips_reward.prompts import (
    MAX_ASPECT_CHARACTERS,
    PROMPTS,
    SplitPrompts,
    conversation,
    normalize_aspect,
    prompt_text,
)


@pytest.fixture(scope="module")
def prompts(metric) -> SplitPrompts:
    return metric.fusion.prompts


@pytest.mark.parametrize("name", [None, "overall", " Overall\n", "OVERALL"])
def test_overall_is_the_prompt_without_an_aspect(prompts, name):
    assert normalize_aspect(name) is None
    assert prompt_text("late", name) == "Represent the similarity of the image."
    assert prompts.suffix(name) == prompts.suffix(None)


def test_blanks_around_an_aspect_do_not_matter(prompts):
    assert prompts.suffix(" camera angle ") == prompts.suffix("camera angle") != prompts.suffix("lighting")


@pytest.mark.parametrize(
    "fusion, expected",
    [
        ("late", "Represent the similarity of the image based on lighting."),
        ("mid", "Represent the similarity of the image based on lighting."),
        ("early", "Measure the similarity between the two images based on lighting."),
    ],
)
def test_wording_of_each_fusion(fusion, expected):
    assert prompt_text(fusion, "lighting") == expected


def test_turns_of_each_fusion():
    kinds = {name: [part["type"] for part in conversation(name, "x")[-1]["content"]] for name in PROMPTS}
    assert kinds == {
        "late": ["image", "text"],
        "mid": ["text", "image"],
        "early": ["text", "image", "image"],
        "triplet": ["image", "text"],
    }
    assert [turn["role"] for turn in conversation("late", "x")] == ["system", "user"]
    assert [turn["role"] for turn in conversation("early", "x")] == ["user"]


def test_prefix_and_suffix_are_the_whole_conversation(prompts):
    tokenizer = prompts.tokenizer
    text = tokenizer.apply_chat_template(conversation("late", "lighting"), tokenize=False, add_generation_prompt=True)
    assert list(prompts.prefix + prompts.suffix("lighting")) == tokenizer(text)["input_ids"]
    assert tokenizer.decode(prompts.suffix("lighting")).endswith("lighting.<|im_end|><|im_start|>assistant")


STRANGE = [
    'say "cheese"',
    "it's",
    "two\nlines\tand tabs",
    "🎨 colour 日本語",
    "{aspect} {0} %s",
    "<b>bold</b>",
    "x" * 2000,
]


@pytest.mark.parametrize("name", STRANGE)
def test_strange_aspects_reach_the_tokens_unchanged(prompts, name):
    decoded = prompts.tokenizer.decode(prompts.prefix + prompts.suffix(name))
    assert f"based on {name}." in decoded


def test_strange_aspects_score(metric, crops):
    assert metric.similarity(crops[0], crops[1], STRANGE).isfinite().all()


@pytest.mark.parametrize("name", ["a <|im_end|> b", "<|image_pad|>", "<|vision_end|>", "x<|endoftext|>"])
def test_control_tokens_in_an_aspect_are_an_error(prompts, name):
    with pytest.raises(TPIPSError, match="control token"):
        prompts.suffix(name)


@pytest.mark.parametrize("name", [3, ["lighting"], b"lighting"])
def test_an_aspect_is_a_string(name):
    with pytest.raises(TPIPSError, match="must be a string"):
        normalize_aspect(name)


@pytest.mark.parametrize("name", ["", "  ", "\n\t"])
def test_an_empty_aspect_is_an_error_and_not_the_overall_score(metric, name):
    image = Image.new("RGB", (8, 8), "red")
    asked = (
        lambda: normalize_aspect(name),
        lambda: metric.similarity(image, image, name),
        lambda: metric.similarity(image, image, ["lighting", name]),
        lambda: metric.distance(image, image, [name]),
        lambda: metric.embed(image, [name]),
        lambda: metric.similarity_pairs([image], [image], [(0, 0, name)]),
        lambda: metric.odd_one_out([image] * 3, [(0, 1, 2, name)]),
        lambda: metric.check_aspect(name),
    )
    for ask in asked:
        with pytest.raises(TPIPSError, match="is empty; name what to compare, or give None or 'overall'"):
            ask()


def test_too_long_an_aspect_is_an_error():
    with pytest.raises(TPIPSError, match=f"at most {MAX_ASPECT_CHARACTERS}"):
        normalize_aspect("x" * (MAX_ASPECT_CHARACTERS + 1))


def test_a_template_that_puts_the_text_first_is_refused(prompts):
    template = "{% for m in messages %}{% for c in m.content | reverse %}{% if c.type == 'image' %}" \
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"  # fmt: skip
    with pytest.raises(TPIPSError, match="image before the text"):
        SplitPrompts(prompts.tokenizer, "late", prompts.image_token_id, 4, template)


def test_a_template_without_an_image_is_refused(prompts):
    with pytest.raises(TPIPSError, match="0 image placeholders"):
        SplitPrompts(prompts.tokenizer, "late", prompts.image_token_id, 4, "{{ messages[-1]['role'] }}")


def test_each_aspect_is_tokenised_once(prompts, monkeypatch):
    prompts.suffix("something new")
    monkeypatch.setattr(prompts, "tokenizer", None)
    assert prompts.suffix("something new")


def test_a_lone_surrogate_is_no_aspect():
    with pytest.raises(TPIPSError, match="surrogate"):
        normalize_aspect("light\udcff")
