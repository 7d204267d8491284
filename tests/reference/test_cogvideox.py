"""CogVideoX under harder conditions: sizes at the edge, what is refused, whole pipelines."""

import json

import numpy as np
import pytest
import torch
from reference_tiny import COG5, COGVIDEOX, TINY, redraw, save, their_model

from diffusion_engine import reference
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.pipeline import denoise, initial_noise, to_pictures
from diffusion_engine.reference.checkpoint import DropIn, read_config
from diffusion_engine.reference.cogvideox import CogVideoX, CogVideoXConfig, centred_positions, channels_last
from diffusion_engine.reference.solvers import DDIM, straight_schedule, straighten
from diffusion_engine.text_conditioning import PromptEmbeds

torch.set_num_threads(1)
ENTRIES = {"prediction_type": "v_prediction", "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
NAMES = ("cogvideox-2b", "cogvideox-5b", "cogvideox-1.5")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict:
    home = tmp_path_factory.mktemp("cogvideox")
    return {name: save(TINY[name], home / name) for name in NAMES}


def their_sampler(**entries):
    from diffusers import CogVideoXDDIMScheduler

    return CogVideoXDDIMScheduler(**ENTRIES | entries)


# --- the network ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cogvideox-5b", "cogvideox-1.5"])
def test_its_own_rotations_are_the_pipelines(name, folders):
    model = reference.from_pretrained(folders[name])
    frames = model.patch[0]
    for call in TINY[name].calls(torch.Generator().manual_seed(3)):
        latents = call["hidden_states"].transpose(1, 2)
        ours = model(latents, call["timestep"], call["encoder_hidden_states"])
        assert (ours.transpose(1, 2) - DropIn(model)(**call).sample).abs().max() < 1e-5
        assert latents.shape[2] % frames == 0


def test_positions_of_every_shape():
    """Real grids and single rows, against diffusers' two functions."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    from diffusion_engine.attention import axial_rope

    rng = np.random.default_rng(0)
    for f, h, w in [(13, 30, 45), (1, 1, 1), (2, 1, 60), (2, 60, 1), *rng.integers(1, 30, (12, 3)).tolist()]:
        crop = get_resize_crop_region_for_grid((h, w), 45, 30)
        theirs = get_3d_rotary_pos_embed(64, crop, (h, w), f)
        ours = axial_rope(centred_positions((f, h, w), (30, 45)), (16, 24, 24))
        for mine, their in zip(ours, theirs):
            assert (mine - their[:, ::2]).abs().max() < 2e-5


def test_a_mask_hides_padding_and_none_shows_it(folders):
    model = reference.from_pretrained(folders["cogvideox-5b"])
    rng = torch.Generator().manual_seed(2)
    latents, text, t = torch.randn(2, 4, 2, 4, 6, generator=rng), torch.randn(2, 7, 20, generator=rng), torch.ones(2)
    real = torch.arange(7) < torch.tensor([[7], [4]])
    noisy = torch.where(real[..., None], text, 50.0)
    assert torch.allclose(model(latents, t, noisy, real), model(latents, t, text, real), atol=1e-5)
    assert not torch.allclose(model(latents, t, noisy), model(latents, t, text), atol=1e-2)
    assert torch.equal(
        model(latents, t, text, real, torch.ones(2, 1)), model(latents, t, text, real)
    )  # pooled is unused


def test_batch_is_single(folders):
    for name in NAMES:
        model, call = reference.from_pretrained(folders[name]), TINY[name].calls(torch.Generator().manual_seed(4))[0]
        args = call["hidden_states"].transpose(1, 2), call["timestep"], call["encoder_hidden_states"]
        alone = torch.cat([model(*(part[i : i + 1] for part in args)) for i in range(2)])
        assert torch.allclose(model(*args), alone, atol=1e-5)


TIMES = torch.tensor([987.0, 500.0, 3.0])


def asked(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, tuple]:
    """Latents of two clips, not square, four frames; text and mask."""
    rng = torch.Generator().manual_seed(6)
    x, text = torch.randn(2, 4, 4, 4, 6, generator=rng).to(dtype), torch.randn(2, 7, 20, generator=rng).to(dtype)
    return x, (text, torch.arange(7) < torch.tensor([[7], [3]]))


@pytest.mark.parametrize("name", NAMES)
def test_hoisted_is_forward_at_every_time(name, folders):
    net, (x, words) = reference.from_pretrained(folders[name]), asked()
    for rest in (words, words[:1]):
        ahead = net.hoist(x.shape[1:], TIMES, *rest)
        for t, given in zip(TIMES, ahead, strict=True):
            assert torch.allclose(net.velocity(x, given), net(x, t.expand(2), *rest), atol=1e-5)
        assert all(given.text is ahead[0].text and given.positions is ahead[0].positions for given in ahead)
        plain = net.conditions(x.shape[1:], TIMES[:2], *rest)
        assert torch.equal(net.velocity(x, plain), net(x, TIMES[:2], *rest))
        assert all(cond is plain.cond[0] for cond in plain.cond)  # nothing is made ahead that a block makes


def test_given_rotations_go_ahead(folders):
    from diffusion_engine.attention import axial_rope, grid_positions

    net, (x, words) = reference.from_pretrained(folders["cogvideox-5b"]), asked()
    rope = axial_rope(7 + 2 * grid_positions(4, 2, 3), (8, 12, 12))
    ahead = net.hoist(x.shape[1:], TIMES, *words, rope=rope)
    assert torch.allclose(net.velocity(x, ahead[1]), net(x, TIMES[1].expand(2), *words, rope=rope), atol=1e-5)
    assert not torch.allclose(net.velocity(x, ahead[1]), net(x, TIMES[1].expand(2), *words), atol=1e-3)


def test_a_step_makes_no_knob(folders):
    """One product a layer for all times ahead, none of them in a step."""
    net, (x, words), rows = reference.from_pretrained(folders["cogvideox-2b"]), asked(), []
    every = [net.time_in, net.final_knobs, *(n.linear for b in net.blocks for n in (b.norm1, b.norm2))]
    hooks = [m.register_forward_hook(lambda m, args, out: rows.append(len(out))) for m in [net.text_in, *every]]
    ahead = net.hoist(x.shape[1:], TIMES, *words)
    assert sorted(rows) == [2] + [6] * len(every)
    rows.clear()
    net.velocity(x, ahead[2])
    assert not rows
    for hook in hooks:
        hook.remove()


def test_half_precision_keeps_its_dtype_ahead(folders):
    for name in NAMES:
        net, (x, words) = reference.from_pretrained(folders[name], dtype=torch.bfloat16), asked(torch.bfloat16)
        exact, (x32, words32) = reference.from_pretrained(folders[name]), asked()
        for t, given in zip(TIMES, net.hoist(x.shape[1:], TIMES, *words)):
            found, truth = net.velocity(x, given), exact(x32, t.expand(2), *words32)
            assert found.dtype == given.text.dtype == given.cond[0][1][0].gate.dtype == torch.bfloat16
            assert (found - truth).abs().mean() < 1.2 * (net(x, t.expand(2), *words) - truth).abs().mean() + 1e-3


def test_sizes_that_do_not_fit_are_named(folders):
    model, text = reference.from_pretrained(folders["cogvideox-1.5"]), torch.zeros(1, 7, 20)
    for shape, needle in (((3, 4, 6), "frames 3.*2 or 4"), ((2, 5, 6), "height 5.*4 or 6"), ((2, 4, 7), "width 7")):
        with pytest.raises(ValueError, match=needle):
            model(torch.zeros(1, 4, *shape), torch.zeros(1), text)
    with pytest.raises(ValueError, match=r"sizes \(4, 6\) are not \(F, H, W\)"):
        model(torch.zeros(1, 4, 4, 6), torch.zeros(1), text)


def test_models_that_are_not_built():
    for entries, needle in (
        ({"ofs_embed_dim": 512}, "ofs_embed_dim 512"),
        (COG5 | {"use_learned_positional_embeddings": True}, "use_learned_positional_embeddings True"),
        ({"use_learned_positional_embeddings": True}, "use_learned_positional_embeddings True"),
        ({"activation_fn": "geglu"}, "'geglu'.*'gelu-approximate'"),
        ({"timestep_activation_fn": "gelu"}, "'silu'"),
        ({"flip_sin_to_cos": False}, "flip_sin_to_cos False"),
        ({"freq_shift": 1}, "freq_shift 1"),
        (COG5 | {"attention_head_dim": 24}, "attention_head_dim 24.*16"),
        ({"attention_head_dim": 20, "num_attention_heads": 3}, "width 60.*48"),
    ):
        with pytest.raises(ValueError, match=needle):
            CogVideoXConfig(**entries)
    with pytest.raises(ValueError, match="use_new_trick"):
        read_config(CogVideoXConfig, {"use_new_trick": True})


def test_a_checkpoint_of_other_sizes_is_a_clear_error(folders, tmp_path):
    """Also where the rows of the last layer cannot be put in order."""
    file = folders["cogvideox-2b"] / "transformer" / "config.json"
    before = file.read_text()
    try:
        for entries, needle in (
            ({"out_channels": 3}, "proj_out"),
            ({"out_channels": 8}, "proj_out"),
            ({"in_channels": 3}, "patch_embed.proj"),
            ({"use_rotary_positional_embeddings": True, "patch_size_t": 2}, "patch_embed.proj"),
            ({"norm_elementwise_affine": False}, "without a place"),
            ({"time_embed_dim": 32}, "time_embedding"),
        ):
            file.write_text(json.dumps(json.loads(before) | entries))
            with pytest.raises(ValueError, match=needle):
                reference.from_pretrained(folders["cogvideox-2b"])
    finally:
        file.write_text(before)


def test_norms_without_weights_and_no_biases(tmp_path):
    """Entries that no released model uses, yet diffusers builds."""
    from reference_tiny import Tiny

    extra = {"norm_elementwise_affine": False, "attention_bias": False, "patch_bias": False, "out_channels": 6}
    tiny = Tiny("cogvideox", "CogVideoXTransformer3DModel", COGVIDEOX | extra, TINY["cogvideox-2b"].calls)
    model = reference.drop_in(save(tiny, tmp_path))
    for call in tiny.calls(torch.Generator().manual_seed(6)):
        assert (model(**call).sample - their_model(tiny)(**call).sample).abs().max() < 1e-5


def test_rows_in_order():
    rows = torch.arange(24).reshape(3, 2, 2, 2)  # c, pt, ph, pw
    assert torch.equal(channels_last(rows.flatten()[:, None], 3)[:, 0], rows.movedim(0, -1).flatten())
    assert torch.equal(channels_last(rows.flatten(), 7), rows.flatten())


def test_the_released_sizes():
    for entries, billions in (
        ({}, 1.69),
        ({"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}, 5.57),
    ):
        with torch.device("meta"):
            count = sum(w.numel() for w in CogVideoX(CogVideoXConfig(**entries)).parameters())
        assert round(count / 1e9, 2) == billions


# --- whole pipelines -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vae():
    from diffusers import AutoencoderKLCogVideoX

    sizes = {"block_out_channels": (8, 8, 8, 8), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}
    sizes |= {f"{way.lower()}_block_types": (f"CogVideoX{way}Block3D",) * 4 for way in ("Down", "Up")}
    model = AutoencoderKLCogVideoX(**sizes, scaling_factor=0.7).eval().requires_grad_(False)
    redraw(model)
    return model


@pytest.mark.parametrize(("name", "shift"), [("cogvideox-2b", 3.0), ("cogvideox-5b", 1.0), ("cogvideox-1.5", 1.0)])
def test_the_loop_and_the_drop_in_are_theirs(name, shift, folders, vae):
    """Latents to 1e-4, pictures to 1/255; two prompts, guidance, five steps; 1.5 with frames that need padding."""
    from diffusers import CogVideoXPipeline

    pipe = CogVideoXPipeline(None, None, vae, their_model(TINY[name]), their_sampler(snr_shift_scale=shift))
    pipe.set_progress_bar_config(disable=True)
    text, no_text = torch.randn(2, 2, 7, 20, generator=torch.Generator().manual_seed(8))
    order = {"prompt_embeds": text, "negative_prompt_embeds": no_text, "guidance_scale": 5.0, "num_frames": 9}
    order |= {"height": 64, "width": 48, "num_inference_steps": 5}
    seeds = {"generator": [torch.Generator().manual_seed(seed) for seed in (3, 4)]}
    expected = pipe(**order, **seeds, output_type="latent").frames
    pictures = pipe(**order, latents=initial_noise([3, 4], expected.shape[1:]), output_type="pil").frames

    model, ddim = reference.from_pretrained(folders[name]), DDIM(**ENTRIES, snr_shift_scale=shift)
    flow = straighten(model, ddim)
    words = [PromptEmbeds(x, torch.ones(2, 7, dtype=torch.bool), x[:, 0, :0]) for x in (text, no_text)]
    velocity = guided_velocity(lambda y, t, prompt: flow(y, t, *prompt), *words, 5.0)
    noise = initial_noise([3, 4], expected.shape[1:]).transpose(1, 2)
    latents = denoise(velocity, noise, straight_schedule(ddim, 5)).latents
    assert (latents - expected.transpose(1, 2)).abs().max() < 1e-4

    clips = vae.decode(latents[:, :, latents.shape[2] - 3 :] / 0.7).sample  # 1.5's first frame is padding
    for clip, theirs in zip(clips, pictures, strict=True):
        frames = to_pictures(clip.transpose(0, 1))
        assert len(frames) == len(theirs) == 9
        assert max(np.abs(np.subtract(a, b, dtype=int)).max() for a, b in zip(frames, theirs)) <= 1

    pipe.transformer = DropIn(model)
    seeds = {"generator": [torch.Generator().manual_seed(seed) for seed in (3, 4)]}
    assert (pipe(**order, **seeds, output_type="latent").frames - expected).abs().max() < 1e-4


def test_the_drop_in_in_bf16_keeps_its_dtype(folders):
    for name in NAMES:
        call = TINY[name].calls(torch.Generator().manual_seed(1))[0]
        model = reference.drop_in(folders[name], dtype=torch.bfloat16)
        for key in ("hidden_states", "encoder_hidden_states"):
            call[key] = call[key].bfloat16()
        assert model(**call).sample.dtype == torch.bfloat16
