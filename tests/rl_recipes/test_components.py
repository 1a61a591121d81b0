"""The built-in editor's parts: sizes, the prompt's dropped prefix, token ids, and the round trip through a folder."""

from __future__ import annotations

import pytest
import torch
from diffusers import QwenImageEditPipeline
from tiny_editors import images, tokenizer

from rl_recipes.builtin import components
from rl_recipes.editors import load_editor
from rl_recipes.editors.single_frame import disable_single_frame, enable_single_frame, single_frame
from rl_recipes.rollout import sample_ode
from tpips_reward.errors import TPIPSError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("editor")
    components.build_pipeline(tokenizer=tokenizer()).save_pretrained(target)
    return target


def _count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_parts_are_small():
    pipe = components.build_pipeline(tokenizer=tokenizer())
    assert _count(pipe.transformer) <= 2_600_000
    assert _count(pipe.text_encoder) <= 600_000
    assert 2 * sum(_count(m) for m in pipe.components.values() if isinstance(m, torch.nn.Module)) <= 9_000_000


def test_the_pipeline_drops_exactly_the_system_turn():
    pipe = components.build_pipeline(tokenizer=tokenizer())
    text = pipe.prompt_template_encode.format("make the circle red")
    kept = pipe.tokenizer(text)["input_ids"][pipe.prompt_template_encode_start_idx :]
    assert pipe.tokenizer.decode(kept).startswith(
        "<|vision_start|><|image_pad|><|vision_end|>make the circle red<|im_end|>"
    )


def test_a_vocabulary_that_splits_the_template_is_refused():
    small = components.build_tokenizer(max_vocab=300)
    with pytest.raises(TPIPSError, match="max_vocab"):
        components.build_pipeline(tokenizer=small)


def test_token_ids_agree_between_tokenizer_and_text_encoder():
    names = tokenizer()
    config = components.build_text_encoder(names).config
    assert names.decode([config.image_token_id]) == "<|image_pad|>"
    assert names.decode([config.video_token_id]) == "<|video_pad|>"
    assert names.decode([config.vision_start_token_id]) == "<|vision_start|>"
    assert config.text_config.pad_token_id == names.pad_token_id
    assert config.text_config.eos_token_id == names.eos_token_id
    assert names.pad_token != names.eos_token
    assert config.text_config.vocab_size == len(names)


def test_any_text_survives_the_tokenizer():
    for text in ("Make the heptagon turquoise!", "сделай \U0001f98a\n\t{}", "<b>bold</b>"):
        assert tokenizer().decode(tokenizer()(text)["input_ids"]) == text


def test_words_of_given_instructions_become_tokens():
    sentence = "please embroider the zeppelin"
    with_words = components.build_tokenizer([sentence] * 1 + ["zeppelin zeppelin embroider embroider"])
    assert len(with_words(sentence)["input_ids"]) < len(tokenizer()(sentence)["input_ids"])


def test_image_tokens_follow_the_image_size():
    pipe = components.build_pipeline(tokenizer=tokenizer())
    lengths = {}
    for side in (64, 96):
        image = (images(1, side, side)[0] * 255).to(torch.uint8)
        lengths[side] = pipe.encode_prompt(["x"], image=[image])[0].shape[1]
    assert lengths[96] - lengths[64] == 9 - 4


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = components.build_transformer(num_layers=1, seed=3).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    second = components.build_transformer(num_layers=1, seed=3).state_dict()
    other = components.build_transformer(num_layers=1, seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["img_in.weight"], other["img_in.weight"])


def test_a_plain_from_pretrained_loads_the_folder(folder):
    loaded = QwenImageEditPipeline.from_pretrained(folder)
    fresh = components.build_pipeline(tokenizer=tokenizer())
    for part in ("vae", "transformer", "text_encoder"):
        ours, theirs = getattr(fresh, part).state_dict(), getattr(loaded, part).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name].float()) for name in ours)
    assert loaded.tokenizer("make the circle red")["input_ids"] == tokenizer()("make the circle red")["input_ids"]
    components.check_prompt_prefix(loaded)
    image = (images(1, 64, 64)[0] * 255).to(torch.uint8)
    states = [pipe.encode_prompt(["x"], image=[image])[0] for pipe in (fresh, loaded)]
    assert torch.allclose(states[0], states[1], atol=1e-6)


def test_the_folder_loads_as_an_editor_and_edits(folder):
    editor = load_editor(folder, device="cpu", resolution=64)
    conditions = editor.encode(images(1, 64, 96), ["make it red"])
    edits = editor.decode(sample_ode(editor, conditions, [torch.Generator().manual_seed(0)], 2), conditions)
    assert edits[0].shape == (3, *editor.output_size(images(1, 64, 96)[0]))
    assert edits[0].dtype == torch.float32 and edits[0].min() >= 0 and edits[0].max() <= 1


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(TPIPSError, match="without its tokenizer"):
        components.build_pipeline(text_encoder=components.build_text_encoder(tokenizer()))
    with pytest.raises(TPIPSError, match="z_dim=8"):
        components.build_pipeline(
            tokenizer=tokenizer(),
            vae=components.build_vae(base_dim=8, z_dim=8),
            transformer=components.build_transformer(num_layers=1),
        )
    with pytest.raises(TPIPSError, match="text_dim=96"):
        components.build_pipeline(
            tokenizer=tokenizer(), transformer=components.build_transformer(num_layers=1, text_dim=48)
        )
    with pytest.raises(TPIPSError, match="multiple of 16"):
        components.build_transformer(head_dim=24)


def test_latent_statistics_are_checked():
    vae = components.build_vae(base_dim=8)
    components.set_latent_statistics(vae, [0.5] * 16, [2.0] * 16)
    assert vae.config.latents_std == [2.0] * 16
    with pytest.raises(TPIPSError, match="16 latent channels"):
        components.set_latent_statistics(vae, [0.0], [1.0])
    with pytest.raises(TPIPSError, match="positive"):
        components.set_latent_statistics(vae, [0.0] * 16, [0.0] * 16)


@pytest.mark.parametrize("released", [False, True], ids=["tiny", "released layout"])
def test_single_frame_convolutions_change_nothing(released):
    torch.manual_seed(0)
    vae = components.build_vae(base_dim=8)
    if released:  # temporal up- and downsampling, as in the released VAE
        config = dict(vae.config) | {"dim_mult": [1, 2, 2, 2], "temperal_downsample": [False, True, True]}
        vae = type(vae).from_config(config).eval()
    pixels = torch.rand(2, 3, 1, 32, 48) * 2 - 1

    def run():
        vae.zero_grad()
        latents = vae.encode(pixels).latent_dist.mode()
        output = vae.decode(latents).sample
        output.square().mean().backward()
        return latents.detach(), output.detach(), [p.grad for p in vae.parameters() if p.grad is not None]

    def nonzero(gradients):
        return [gradient for gradient in gradients if bool(gradient.any())]

    slow = run()
    with single_frame(vae):
        fast = run()
    assert (slow[0] - fast[0]).abs().max() < 1e-5
    assert (slow[1] - fast[1]).abs().max() < 1e-5
    pairs = list(zip(nonzero(slow[2]), nonzero(fast[2]), strict=True))
    assert pairs and all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


def test_single_frame_convolutions_leave_videos_alone():
    torch.manual_seed(0)
    vae = components.build_vae(base_dim=8)
    video = torch.rand(1, 3, 5, 16, 16) * 2 - 1
    with torch.no_grad():
        expected = vae.encode(video).latent_dist.mode()
        enable_single_frame(vae)
        assert torch.allclose(vae.encode(video).latent_dist.mode(), expected, atol=1e-6)
        disable_single_frame(vae)
    assert not any("forward" in module.__dict__ for module in vae.modules())
