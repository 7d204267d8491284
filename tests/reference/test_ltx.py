"""LTX-Video beyond the shared parity tests: coordinates, times a token, its other pipelines, what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_tiny import LTX as SIZES
from reference_tiny import TINY, draw, save, their_model

from diffusion_engine import reference
from diffusion_engine.guidance import guided_velocity
from diffusion_engine.pipeline import denoise, initial_noise
from diffusion_engine.reference.ltx import LTXConfig, fractional_rope, ltx_positions
from diffusion_engine.scheduler import Schedule
from diffusion_engine.text_conditioning import PromptEmbeds

DYNAMIC = dict(use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, shift_terminal=0.1)
NARROW = dict(latent_channels=8, block_out_channels=(4,) * 4, decoder_block_out_channels=(4,) * 4)
NARROW |= dict(layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(TINY["ltx"], tmp_path_factory.mktemp("ltx"))


@pytest.fixture(scope="module")
def ltx(folder):
    return reference.from_pretrained(folder)


@pytest.fixture(scope="module")
def vae():
    from diffusers import AutoencoderKLLTXVideo

    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = AutoencoderKLLTXVideo(**NARROW).eval().requires_grad_(False)
        vae.latents_mean.normal_()
        vae.latents_std.uniform_(0.5, 1.5)
        for weight in vae.parameters():
            weight.copy_(torch.randn(weight.shape) / (weight[0].numel() if weight.ndim > 1 else 4) ** 0.5)
    return vae


def prompts(count: int) -> dict:
    """Padded prompts and negative prompts as pipelines take them, each with a length of its own."""
    rng, sides = torch.Generator().manual_seed(3), {}
    for k, side in enumerate(("", "negative_")):
        lengths = torch.arange(count)[:, None] + 3 + 2 * k
        sides[f"{side}prompt_embeds"] = draw(rng, count, 7, 24)
        sides[f"{side}prompt_attention_mask"] = (torch.arange(7) < lengths).long()
    return sides


def pipeline(kind: str, vae, scheduler: dict):
    import diffusers

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**scheduler)
    pipe = getattr(diffusers, kind)(scheduler, vae, None, None, their_model(TINY["ltx"]))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def seeds(*numbers: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(number) for number in numbers]


@pytest.mark.parametrize(("steps", "guidance", "frames", "rate"), [(2, 1.0, 1, 25), (5, 3.0, 25, 30)])
def test_our_loop_is_ltx_pipeline(ltx, vae, steps, guidance, frames, rate):
    """Two prompts, seeds of their own, our schedule from the scheduler's file: latents and pictures."""
    pipe, words = pipeline("LTXPipeline", vae, DYNAMIC), prompts(2)
    ask = dict(height=32, width=96, num_frames=frames, frame_rate=rate, num_inference_steps=steps, **words)
    ask |= {"guidance_scale": guidance}
    expected = pipe(**ask, output_type="latent", generator=seeds(7, 8)).frames
    clips = torch.from_numpy(pipe(**ask, output_type="np", generator=seeds(7, 8)).frames)
    grid = ((frames - 1) // 8 + 1, 1, 3)
    sides = [
        PromptEmbeds(
            embeds := words[f"{side}prompt_embeds"], words[f"{side}prompt_attention_mask"].bool(), embeds[:, 0]
        )
        for side in ("", "negative_")
    ]
    config = {**pipe.scheduler.config, "_class_name": "FlowMatchEulerDiscreteScheduler"}
    schedule = Schedule.from_config(config, steps, num_tokens=math.prod(grid))
    velocity = guided_velocity(lambda x, t, p: ltx(x, t, p.tokens, p.mask, frame_rate=rate), *sides, guidance)
    found = denoise(velocity, initial_noise([7, 8], (8, *grid)), schedule).latents
    assert (found.flatten(2).mT - expected).abs().max() < 1e-4
    raw = found * vae.latents_std.reshape(-1, 1, 1, 1) + vae.latents_mean.reshape(-1, 1, 1, 1)
    drawn = (vae.decode(raw, return_dict=False)[0] / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1)
    assert clips.std() > 0.1 and (drawn - clips).abs().max() < 1 / 255


def test_condition_pipeline_hands_over_causal_coordinates(ltx, folder, vae):
    """The newer text-to-video pipeline: our ``causal`` positions are its ``video_coords``."""
    pipe, words = pipeline("LTXConditionPipeline", vae, {}), prompts(1)
    ask = dict(height=64, width=96, num_frames=17, frame_rate=24, num_inference_steps=2, output_type="latent", **words)
    expected = pipe(**ask, generator=seeds(7)[0]).frames
    pipe.transformer = reference.drop_in(folder)
    assert (pipe(**ask, generator=seeds(7)[0]).frames - expected).abs().max() < 1e-5
    seen = []
    as_diffusers = pipe.transformer.model.as_diffusers
    pipe.transformer.model.as_diffusers = lambda **given: seen.append(given) or as_diffusers(**given)
    pipe(**ask, generator=seeds(7)[0])
    call = seen[0]
    latents = call["hidden_states"].mT.unflatten(2, (3, 2, 3))
    mask, t = call["encoder_attention_mask"].bool(), call["timestep"]
    mine = ltx(latents, t, call["encoder_hidden_states"], mask, frame_rate=24, causal=True)
    assert (mine.flatten(2).mT - as_diffusers(**call)).abs().max() < 1e-5


def test_image_to_video_pipeline_gives_every_token_a_time(folder, vae):
    pipe, words = pipeline("LTXImageToVideoPipeline", vae, DYNAMIC), prompts(1)
    picture = torch.rand(1, 3, 64, 96, generator=seeds(5)[0])
    ask = dict(image=picture, height=64, width=96, num_frames=17, frame_rate=24, num_inference_steps=3, **words)
    expected = pipe(**ask, output_type="latent", generator=seeds(7)[0]).frames
    pipe.transformer = reference.drop_in(folder)
    assert (pipe(**ask, output_type="latent", generator=seeds(7)[0]).frames - expected).abs().max() < 1e-4


@given(st.integers(1, 4), st.integers(1, 9), st.sampled_from([(8, 32), (4, 8)]))
@settings(deadline=None, max_examples=20)
def test_one_clock(factor, frames, compression):
    """k times the frame rate: every k-th latent frame stands where it stood; places never depend on the rate."""
    slow = ltx_positions((frames, 2, 3), 24, compression).unflatten(0, (frames, 6))
    fast = ltx_positions((factor * frames, 2, 3), 24 * factor, compression).unflatten(0, (-1, 6))
    assert torch.allclose(fast[::factor], slow, rtol=1e-6)
    assert slow[0, 0].tolist() == [0, 0, 0]


@given(st.sampled_from([(48, 4), (64, 4), (20, 5), (6, 1), (132, 3)]), st.integers(0, 999))
@settings(deadline=None, max_examples=20)
def test_turns_are_their_rotary_embedding(sizes, seed):
    from diffusers.models.transformers.transformer_ltx import LTXVideoRotaryPosEmbed

    (width, heads), rng = sizes, torch.Generator().manual_seed(seed)
    spots = torch.rand(2, 11, 3, generator=rng) * torch.tensor([25.0, 3000.0, 3000.0])  # beyond the spans too
    cos, sin = LTXVideoRotaryPosEmbed(width)(torch.zeros(2, 1, 1), video_coords=spots.mT)
    rope = fractional_rope(spots, width, heads)
    assert torch.equal(rope.cos.transpose(1, 2).flatten(2), cos[..., ::2])
    assert torch.equal(rope.sin.transpose(1, 2).flatten(2), sin[..., ::2])


def test_batch_is_single(ltx):
    rng = torch.Generator().manual_seed(0)
    latents, text = draw(rng, 2, 8, 2, 3, 2), draw(rng, 2, 5, 24)
    t, mask = torch.tensor([900.0, 40.0]), torch.arange(5) < torch.tensor([[5], [2]])
    together = ltx(latents, t, text, mask)
    for i in (0, 1):
        alone = ltx(latents[i : i + 1], t[i : i + 1], text[i : i + 1], mask[i : i + 1])
        assert (alone - together[i : i + 1]).abs().max() < 1e-5


def test_a_prompt_without_a_real_token(ltx):
    """diffusers' finite bias lets the padding be seen then; ours never is."""
    rng, nothing = torch.Generator().manual_seed(0), torch.zeros(1, 5, dtype=torch.bool)
    latents, text, t = draw(rng, 1, 8, 2, 3, 2), draw(rng, 1, 5, 24), torch.tensor([500.0])
    assert torch.equal(ltx(latents, t, text, nothing), ltx(latents, t, 10 * text, nothing))
    assert ltx(latents, t, text, nothing).isfinite().all()
    theirs, call = their_model(TINY["ltx"]), dict(num_frames=2, height=3, width=2)
    packed = latents.flatten(2).mT
    seen = [theirs(packed, k * text, t, nothing.long(), **call).sample for k in (1, 10)]
    assert (seen[0] - seen[1]).abs().max() > 1e-3


def test_time_stays_exact_in_half_precision(folder):
    """A time between two numbers of bf16 is a time of its own."""
    net, rng = reference.from_pretrained(folder, dtype=torch.bfloat16), torch.Generator().manual_seed(0)
    latents, text = draw(rng, 1, 8, 2, 3, 2).bfloat16(), draw(rng, 1, 5, 24).bfloat16()
    a, b = (net(latents, torch.tensor([t]), text) for t in (750.0, 751.0))
    assert not torch.equal(a, b)


@pytest.mark.parametrize(
    "change",
    [
        {"patch_size": 2},
        {"patch_size_t": 2},
        {"norm_elementwise_affine": True},
        {"norm_eps": 1e-5},
        {"qk_norm": "rms_norm"},
        {"activation_fn": "gelu"},
        {"attention_out_bias": False},
        {"cross_attention_dim": 32},
        {"attention_head_dim": 15, "cross_attention_dim": 60},
    ],
)
def test_what_is_not_built_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        LTXConfig(**(SIZES | change))


TIMES = torch.tensor([987.6, 500.0, 3.2])


def asked(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, tuple, dict]:
    """Latents of two clips, not square, four frames; text and mask; where the clip stands."""
    rng = torch.Generator().manual_seed(6)
    words = draw(rng, 2, 7, 24).to(dtype), torch.arange(7) < torch.tensor([[7], [3]])
    return draw(rng, 2, 8, 4, 2, 3).to(dtype), words, {"frame_rate": 30.0, "compression": (4, 16), "causal": True}


@pytest.mark.parametrize("name", ["ltx", "ltx-narrow"])
def test_hoisted_is_forward_at_every_time(name, tmp_path):
    net, (x, words, where) = reference.from_pretrained(save(TINY[name], tmp_path)), asked()
    ahead = net.hoist(x.shape[1:], TIMES, *words, **where)
    for t, ready in zip(TIMES, ahead, strict=True):
        assert torch.allclose(net.velocity(x, ready), net(x, t.expand(2), *words, **where), atol=1e-5)
        packed = net.run(x.flatten(2).mT, ready).mT.unflatten(2, x.shape[2:])
        assert torch.equal(packed, net.velocity(x, ready))
    assert all(ready.text is ahead[0].text and ready.positions is ahead[0].positions for ready in ahead)
    assert not torch.allclose(net.velocity(x, net.hoist(x.shape[1:], TIMES, *words)[0]), net.velocity(x, ahead[0]))
    plain = net.conditions(x.shape[1:], TIMES[:2], *words, **where)
    assert torch.equal(net.velocity(x, plain), net(x, TIMES[:2], *words, **where))
    assert all(text is plain.text[0] for text in plain.text)  # nothing is made ahead that a block makes


def test_a_step_makes_no_knob_and_no_key(ltx):
    """One product a layer for all times ahead, none of them in a step."""
    (x, words, where), rows = asked(), []
    once, every = [ltx.text_in, *(block.cross.kv for block in ltx.blocks)], [ltx.time_in, ltx.knobs]
    hooks = [m.register_forward_hook(lambda m, args, out: rows.append(len(out))) for m in once + every]
    ahead = ltx.hoist(x.shape[1:], TIMES, *words, **where)
    assert sorted(rows) == [2] * len(once) + [6] * len(every)
    rows.clear()
    ltx.velocity(x, ahead[2])
    assert not rows
    for hook in hooks:
        hook.remove()


def test_half_precision_keeps_its_dtypes_ahead(ltx, folder):
    net, (x, words, where) = reference.from_pretrained(folder, dtype=torch.bfloat16), asked(torch.bfloat16)
    x32, words32, _ = asked()
    for t, ready in zip(TIMES, net.hoist(x.shape[1:], TIMES, *words, **where)):
        found, truth = net.velocity(x, ready), ltx(x32, t.expand(2), *words32, **where)
        assert found.dtype == ready.text[0][0].dtype == ready.cond[0][1].gate.dtype == torch.bfloat16
        assert (found - truth).abs().mean() < 1.2 * (net(x, t.expand(2), *words, **where) - truth).abs().mean() + 1e-3


def test_bad_input(ltx):
    text, t = torch.zeros(1, 3, 24), torch.zeros(1)
    with pytest.raises(ValueError, match="F = 1 for a picture"):
        ltx(torch.zeros(1, 8, 4, 4), t, text)
    for rate in (0, -24.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="try 25"):
            ltx(torch.zeros(1, 8, 1, 4, 4), t, text, frame_rate=rate)
    with pytest.raises(ValueError, match="float32"):
        ltx(torch.zeros(1, 8, 1, 4, 4), t.bfloat16(), text)
