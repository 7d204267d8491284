"""Wan beyond the tests that all families share: random sizes, padding, variants, and its pipelines."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_tiny import TINY, draw, redraw, save, their_model
from safetensors.torch import load_file, save_file

from diffusion_engine import reference
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.pipeline import denoise, initial_noise
from diffusion_engine.reference.checkpoint import their_names
from diffusion_engine.reference.wan import WanConfig
from diffusion_engine.scheduler import Schedule
from diffusion_engine.text_conditioning import PromptEmbeds

NAMES = [name for name, tiny in TINY.items() if tiny.module == "wan"]
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict:
    home = tmp_path_factory.mktemp("wan")
    return {name: save(TINY[name], home / name) for name in NAMES}


@pytest.fixture(scope="module")
def pair(folders):
    """diffusers' small model, and ours from its file."""
    return their_model(TINY["wan-1.3b"]), reference.from_pretrained(folders["wan-1.3b"])


def rng(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- the network -----------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    b=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(1, 5)),
    tokens=st.integers(1, 20),
    t=st.floats(0, 1000, width=32),
)
def test_any_size_is_theirs(pair, b, sizes, tokens, t):
    theirs, ours = pair
    f, h, w = sizes
    x, text, times = draw(rng(), b, 4, f, 2 * h, 2 * w), draw(rng(4), b, tokens, 24), torch.full((b,), t)
    expected = theirs(x, times, text).sample
    assert (ours(x, times, text) - expected).abs().max() < 1e-5
    assert torch.allclose(ours(x[-1:], times[-1:], text[-1:]), expected[-1:], atol=1e-5)  # a batch is its samples


def test_whole_numbered_times_are_taken(pair):
    """UniPC's times are int64."""
    theirs, ours = pair
    call = {"hidden_states": draw(rng(), 1, 4, 2, 4, 2), "encoder_hidden_states": draw(rng(), 1, 5, 24)}
    expected = theirs(**call, timestep=torch.tensor([937])).sample
    assert (ours.as_diffusers(**call, timestep=torch.tensor([937])) - expected).abs().max() < 1e-5
    assert (ours.as_diffusers(**call, timestep=torch.tensor([938])) - expected).abs().max() > 1e-5


def test_a_mask_means_zeros_as_in_the_pipeline(pair):
    """`_get_t5_prompt_embeds` cuts each prompt at its length and fills up with zeros."""
    theirs, ours = pair
    x, text, t, lengths = draw(rng(), 2, 4, 2, 4, 2), draw(rng(), 2, 9, 24), torch.tensor([500.0, 20.0]), (9, 4)
    padded = torch.stack([torch.cat([u[:n], u.new_zeros(9 - n, 24)]) for u, n in zip(text, lengths)])
    text[1, 4:] = float("inf")  # what a mask covers is not read
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    assert (ours(x, t, text, mask) - theirs(x, t, padded).sample).abs().max() < 1e-5


def test_times_of_tokens(folders):
    """Wan2.2 5B: equal times are one time; a token's own time steers it most."""
    ours = reference.from_pretrained(folders["wan-2.2-5b"])
    x, text, t = draw(rng(), 2, 4, 3, 4, 6), draw(rng(), 2, 5, 24), torch.tensor([700.0, 30.0])
    many = t[:, None].repeat(1, 18)
    assert torch.allclose(ours(x, many, text), ours(x, t, text), atol=1e-5)
    other = many.clone()
    other[:, 6] = 0.0  # the first token of the second frame
    change = (ours(x, other, text) - ours(x, t, text)).abs().amax(dim=(0, 1))  # (3, 4, 6)
    place = change == change.max()
    assert place[1, :2, :2].any() and place.sum() == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_same_tensors_stay_fp32(name, folders):
    """diffusers' ``_keep_in_fp32_modules``, tensor by tensor."""
    from diffusers import WanTransformer3DModel

    theirs = WanTransformer3DModel.from_pretrained(folders[name] / "transformer", torch_dtype=torch.bfloat16)
    ours = reference.from_pretrained(folders[name], dtype=torch.bfloat16)
    kinds, key_map = theirs.state_dict(), ours.key_map(ours.config)
    for mine, weight in ours.state_dict().items():
        assert {kinds[key].dtype for key in their_names(key_map, mine)} == {weight.dtype}, mine


def test_old_image_files_hold_a_norm_that_nobody_reads(folders, tmp_path):
    folder = save(TINY["wan-image"], tmp_path) / "transformer"
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    save_file(tensors | {"blocks.0.attn2.norm_added_q.weight": torch.ones(48)}, file)
    assert reference.from_pretrained(tmp_path)
    save_file(tensors | {"blocks.0.attn1.norm_added_q.weight": torch.ones(48)}, file)
    with pytest.raises(ValueError, match="without a place"):
        reference.from_pretrained(tmp_path)


# --- what no latent changes ------------------------------------------------------------------------------------------

TIMES = torch.tensor([987.6, 500.0, 3.2])


def asked(name: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, tuple]:
    """Latents of two clips, not square, five frames; text, a mask and what else `conditions` takes after the time."""
    picture = name == "wan-image"
    x, text = draw(rng(), 2, 12 if picture else 4, 5, 4, 6).to(dtype), draw(rng(4), 2, 9, 24).to(dtype)
    image = (draw(rng(5), 2, 5, 20).to(dtype),) if picture else ()
    return x, (text, torch.arange(9) < torch.tensor([[9], [4]]), None, *image)


@pytest.mark.parametrize("name", NAMES)
def test_hoisted_is_forward_at_every_time(name, folders):
    net, (x, words) = reference.from_pretrained(folders[name]), asked(name)
    ahead = net.hoist(x.shape[1:], TIMES, *words)
    for t, ready in zip(TIMES, ahead, strict=True):
        assert torch.allclose(net.velocity(x, ready), net(x, t.expand(2), *words), atol=1e-5)
    assert all(ready.text is ahead[0].text and ready.positions is ahead[0].positions for ready in ahead)
    assert {len(keys) for keys in ahead[0].text} == {4 if name == "wan-image" else 2}
    plain = net.conditions(x.shape[1:], TIMES[:2], *words)
    assert torch.equal(net.velocity(x, plain), net(x, TIMES[:2], *words))
    assert all(text is plain.text[0] for text in plain.text)  # nothing is made ahead that a block makes


def test_a_step_makes_no_knob_and_no_key(folders):
    """One product a layer for all times ahead, none of them in a step."""
    net, (x, words), rows = reference.from_pretrained(folders["wan-image"]), asked("wan-image"), []
    once = [net.text_in, net.image_in, *(m for b in net.blocks for m in (b.cross.kv, b.cross.image_kv))]
    every = [net.time_in, net.knobs]
    hooks = [m.register_forward_hook(lambda m, args, out: rows.append(len(out))) for m in once + every]
    ahead = net.hoist(x.shape[1:], TIMES, *words)
    assert sorted(rows) == [2] * len(once) + [6] * len(every)
    rows.clear()
    net.velocity(x, ahead[2])
    assert not rows
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_keeps_its_dtypes_ahead(name, folders):
    net, (x, words) = reference.from_pretrained(folders[name], dtype=torch.bfloat16), asked(name, torch.bfloat16)
    exact, (x32, words32) = reference.from_pretrained(folders[name]), asked(name)
    for t, ready in zip(TIMES, net.hoist(x.shape[1:], TIMES, *words)):
        found, truth = net.velocity(x, ready), exact(x32, t.expand(2), *words32)
        assert found.dtype == ready.text[0][0].dtype == torch.bfloat16
        assert ready.cond[0][0].gate.dtype == ready.cond[-1].scale.dtype == torch.float32  # as the tables are
        assert (found - truth).abs().mean() < 1.2 * (net(x, t.expand(2), *words) - truth).abs().mean() + 1e-3


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "needle"),
    [
        ({"pos_embed_seq_len": 514}, "pos_embed_seq_len 514 is not built here; try None"),
        ({"qk_norm": "rms_norm"}, "rms_norm_across_heads"),
        ({"qk_norm": None}, "rms_norm_across_heads"),
        ({"eps": 1e-5}, "1e-06"),
        ({"image_dim": 1280}, "try 48"),
        ({"added_kv_proj_dim": 48}, "try None"),
        ({"image_dim": 1280, "added_kv_proj_dim": 1280}, "try 48"),
        ({"attention_head_dim": 25}, "head_dim 25"),
        ({"vace_layers": [0, 5]}, "vace_layers"),
        ({"ffn_dim": 81}, "blocks.0.ffn"),
        ({"patch_size": [1, 1, 2]}, "patch_embedding.weight"),
    ],
)
def test_configurations_that_are_not_built(entries, needle, tmp_path):
    folder = save(TINY["wan-1.3b"], tmp_path) / "transformer" / "config.json"
    folder.write_text(json.dumps(json.loads(folder.read_text()) | entries))
    with pytest.raises(ValueError, match=needle):
        reference.from_pretrained(tmp_path)


def test_inputs_that_do_not_fit(pair, folders):
    x, t, text = draw(rng(), 1, 4, 2, 4, 6), torch.tensor([5.0]), draw(rng(), 1, 3, 24)
    ours, image = pair[1], reference.from_pretrained(folders["wan-image"])
    for model, call, needle in (
        (ours, (x[:, :3], t, text), r"expected \(B, 4, F, H, W\)"),
        (ours, (x[:, :, 0], t, text), r"expected \(B, 4, F, H, W\)"),
        (ours, (x[..., :5], t, text), "latent width 5 is not a multiple of patch 2; try 4 or 6"),
        (ours, (x[..., :3, :], t, text), "latent height 3"),
        (ours, (x, t.bfloat16(), text), "float32"),
        (ours, (x, t, text, None, None, text), "image given; image_dim None"),
        (image, (draw(rng(), 1, 12, 2, 4, 6), t, text), "image is missing; image_dim 20"),
        (image, (x, t, text), r"expected \(B, 12, F, H, W\)"),
    ):
        with pytest.raises(ValueError, match=needle):
            model(*call)
    with pytest.raises(ValueError, match=r"shape \(B, 4, 2, 4\); expected"):
        ours.hoist((4, 2, 4), TIMES, text)
    assert ours.min_multiple == 2


def test_the_14b_is_the_default():
    assert WanConfig().width == 5120 and WanConfig().image_dim is None


# --- pipelines -------------------------------------------------------------------------------------------------------


def tiny_vae():
    from diffusers import AutoencoderKLWan

    sizes = {"dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
    statistics = {"latents_mean": [0.1, -0.3, 0.0, 0.7], "latents_std": [1.5, 0.6, 2.0, 1.0]}
    vae = AutoencoderKLWan(base_dim=4, z_dim=4, **sizes, **statistics).eval().requires_grad_(False)
    redraw(vae)
    return vae


def text_to_video(theirs, scheduler, **options):
    from diffusers import WanPipeline

    pipe = WanPipeline(None, None, tiny_vae(), scheduler, theirs, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompts() -> dict:
    words = draw(rng(5), 2, 2, 7, 24)
    words[:, :, 5:] = 0
    return {"prompt_embeds": words[0], "negative_prompt_embeds": words[1]}


SIZE = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 4, "guidance_scale": 4.0}


@pytest.mark.parametrize("name", ["wan-1.3b", "wan-14b"])
def test_our_loop_is_their_pipeline(name, folders):
    """Two prompts: latents to 1e-4, clips to 1/255; noise, guidance, schedule and steps are ours."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    pipe, words = text_to_video(their_model(TINY[name]), scheduler), prompts()
    net, seeds = reference.from_pretrained(folders[name]), [11, 12]
    call = SIZE | words | {"generator": [torch.Generator().manual_seed(seed) for seed in seeds]}
    expected = pipe(**call, output_type="latent").frames

    cond, uncond = (PromptEmbeds(w, torch.ones(2, 7, dtype=torch.bool), w[:, 0]) for w in words.values())
    velocity = guided_velocity(lambda x, t, p: net(x, t, *p), cond, uncond, SIZE["guidance_scale"])
    schedule = Schedule.from_config(json.loads(scheduler.to_json_string()), SIZE["num_inference_steps"], grid="double")
    latents = denoise(velocity, initial_noise(seeds, (4, 3, 4, 6)), schedule).latents
    assert (latents - expected).abs().max() < 1e-4

    mean, std = (torch.tensor(pipe.vae.config[f"latents_{x}"]).reshape(-1, 1, 1, 1) for x in ("mean", "std"))
    clips = (pipe.vae.decode(latents * std + mean).sample.clamp(-1, 1) * 127.5 + 127.5).round().permute(0, 2, 3, 4, 1)
    call["generator"] = [torch.Generator().manual_seed(seed) for seed in seeds]
    theirs = np.stack(
        [np.stack([np.asarray(f, float) for f in clip]) for clip in pipe(**call, output_type="pil").frames]
    )
    assert theirs.shape == (2, 9, 32, 48, 3) and theirs.std() > 10
    assert np.abs(clips.numpy() - theirs).max() <= 1


def run(pipe, transformers: dict, **call):
    for part, net in transformers.items():
        setattr(pipe, part, net)
    return pipe(**SIZE | prompts() | call, generator=torch.Generator().manual_seed(7), output_type="latent").frames


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_drop_in_with_the_files_scheduler(dtype, folders):
    from diffusers import UniPCMultistepScheduler, WanTransformer3DModel

    folder = folders["wan-1.3b"]
    theirs = WanTransformer3DModel.from_pretrained(folder / "transformer", torch_dtype=dtype)
    pipe = text_to_video(theirs, UniPCMultistepScheduler(**FLOW))
    expected = run(pipe, {"transformer": theirs})
    found = run(pipe, {"transformer": reference.drop_in(folder, dtype=dtype)})
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < (1e-4 if dtype == torch.float32 else 0.2)


def test_two_transformers_share_the_road(folders):
    """Wan2.2 A14B: one network above a noise level, another below; the architecture is 2.1's."""
    from diffusers import UniPCMultistepScheduler

    theirs = {"transformer": their_model(TINY["wan-1.3b"]), "transformer_2": their_model(TINY["wan-14b"])}
    ours = {"transformer": reference.drop_in(folders["wan-1.3b"])}
    ours["transformer_2"] = reference.drop_in(folders["wan-14b"])
    parts = {"transformer_2": theirs["transformer_2"], "boundary_ratio": 0.8}
    pipe = text_to_video(theirs["transformer"], UniPCMultistepScheduler(**FLOW), **parts)
    assert (run(pipe, ours) - run(pipe, theirs)).abs().max() < 1e-4


def test_one_time_a_token_in_the_pipeline(folders):
    """Wan2.2 5B: the pipeline hands (B, N) times."""
    from diffusers import UniPCMultistepScheduler

    theirs = {"transformer": their_model(TINY["wan-2.2-5b"])}
    ours = {"transformer": reference.drop_in(folders["wan-2.2-5b"])}
    pipe = text_to_video(theirs["transformer"], UniPCMultistepScheduler(**FLOW), expand_timesteps=True)
    assert (run(pipe, ours) - run(pipe, theirs)).abs().max() < 1e-4


def test_image_to_video(folders):
    """diffusers' image pipeline joins noise, mask and the encoded first frame, 12 channels, and hands CLIP's vectors."""
    from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline
    from PIL import Image

    theirs = {"transformer": their_model(TINY["wan-image"])}
    ours = {"transformer": reference.drop_in(folders["wan-image"])}
    pipe = WanImageToVideoPipeline(
        None, None, tiny_vae(), UniPCMultistepScheduler(**FLOW), transformer=theirs["transformer"]
    )
    pipe.set_progress_bar_config(disable=True)
    words = {name: torch.cat([value[:1], torch.zeros(1, 505, 24)], dim=1) for name, value in prompts().items()}
    picture = Image.fromarray((np.indices((32, 48)).sum(0)[..., None] * np.array([1, 2, 3])).astype(np.uint8))
    seen, call = draw(rng(6), 1, 5, 20), {"image": picture} | words
    pipe.encode_image = lambda image, device: seen  # CLIP's part
    expected = run(pipe, theirs, **call)
    assert (run(pipe, ours, **call) - expected).abs().max() < 1e-4
    seen.neg_()
    assert (run(pipe, ours, **call) - expected).abs().max() > 0.01  # the picture is heard
