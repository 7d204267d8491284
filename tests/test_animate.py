"""Clips: `TextToVideo`, the `animate` command, and their files, on a tiny clip model with random weights."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageChops, ImageSequence

from diffusion_engine import EngineWarning, TextToVideo, files, load_clip_model, request
from diffusion_engine import engine as engines
from diffusion_engine.cli import main
from diffusion_engine.clip_memory import (
    plan_video_memory,
    planned_video_decode,
    video_activation_bytes,
    video_decode_bytes,
    video_radius,
)
from diffusion_engine.files import CLIP_SUFFIXES, animation, read_clip_record, save_clip
from diffusion_engine.memory_manager import RESERVE, LiveBytes, parse_bytes, weight_bytes
from diffusion_engine.model_folder import CLIP_WEIGHTS, SHIPPED_CLIP_MODEL, check_clip_folder, save_clip_model
from diffusion_engine.optimizations import StepCache, compiled_blocks
from diffusion_engine.pipeline import initial_noise
from diffusion_engine.text_conditioning import TextEncoderConfig
from diffusion_engine.video import AcceleratedVideo, TextRefiner, VideoDiT, VideoDiTConfig, VideoVAE, VideoVAEConfig

BEST = {"guidance_scale": 2.0, "num_inference_steps": 28, "shift": 1.5, "height": 32, "width": 32, "frames": 5}


@pytest.fixture(scope="session")
def tiny_clip_model(tmp_path_factory) -> Path:
    """A clip model's folder over the shipped text encoder; treat it as read-only."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = {
            "dit": VideoDiT(VideoDiTConfig(width=24, heads=2, depth=2)),
            "vae": VideoVAE(VideoVAEConfig(width=8, narrow=4, depth=1)),
            "refiner": TextRefiner(TextEncoderConfig(depth=1)),
        }
        for module in parts.values():
            for weight in module.parameters():
                if not weight.any():
                    torch.nn.init.normal_(weight, std=0.1)
    folder = tmp_path_factory.mktemp("clips") / "tiny"
    save_clip_model(folder, **parts, recommended=BEST)
    return folder


@pytest.fixture(scope="session")
def video(tiny_clip_model) -> TextToVideo:
    return TextToVideo.from_pretrained(tiny_clip_model, device="cpu")


def draw(engine, *args, **settings):
    return engine(*args, **({"num_inference_steps": 2} | settings))


# The engine


def test_a_clip_of_a_batch_is_the_one_drawn_alone(video):
    prompts = ["cat face, spinning", "火箭，向上移动"]
    batch = draw(video, prompts, num_videos_per_prompt=2, seed=7, negative_prompt=["", "blue"])
    assert batch.seeds == (7, 8, 9, 10) and len(batch.clips) == 4 and {len(clip) for clip in batch.clips} == {5}
    for i in range(4):
        alone = draw(video, prompts[i // 2], seed=7 + i, negative_prompt="blue" if i > 1 else None)
        assert (batch.latents[i] - alone.latents[0]).abs().max() < 1e-4


def test_twice_is_bit_identical_seeds_and_words_matter(video):
    before = torch.get_rng_state()
    first = draw(video, "cat face, spinning")
    assert torch.equal(first.latents, draw(video, "cat face, spinning").latents)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first.latents, draw(video, "cat face, spinning", seed=1).latents)
    assert not torch.equal(first.latents, draw(video, "cat face, bouncing").latents)


def test_latents_frames_and_sizes(video):
    shape = video.latent_shape(32, 32, 5)
    assert shape == (8, 2, 8, 8)
    noise = initial_noise([0], shape)
    assert torch.equal(draw(video, "cat", latents=noise).latents, draw(video, "cat").latents)
    for frames, latents in ((1, 1), (5, 2), (17, 5)):
        result = draw(video, "cat", frames=frames, height=48)
        assert result.latents.shape == (1, 8, latents, 12, 8)
        assert [frame.size for frame in result.clips[0]] == [(32, 48)] * frames
    assert [len(clip) for clip in video.decode(result.latents)] == [17]


def test_time_and_bytes_of_every_stage(video):
    result = draw(video, "cat")
    assert list(result.seconds) == list(result.peak_bytes) == ["encode", "noise", "denoise", "decode"]
    assert result.peak_bytes["decode"] > 5 * 3 * 32 * 32 * 4  # at least the frames themselves
    counted = draw(video, "cat", profile=True)
    assert counted.seconds == {} and counted.peak_bytes.keys() == result.peak_bytes.keys()
    assert torch.equal(counted.latents, result.latents)


def test_cancelled_has_no_clips(video):
    result = draw(video, "cat", num_inference_steps=3, callback=lambda info: False)
    assert result.cancelled and result.clips == [] and result.step == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frames": 16}, r"16 frames are not 4k \+ 1; try 13 or 17"),
        ({"frames": 0}, "frames 0 is below 1; try 1"),
        ({"frames": 2.5}, "frames 2.5 is not a whole number; try 2"),
        ({"frames": 1000}, "frames 1000 is above 257; try 257"),
        ({"height": 40}, "height 40 is not a multiple of 16; try 32 or 48"),
        ({"width": 16}, "width 16 is below 32; try 32"),
        ({"num_inference_steps": 0}, "steps 0 is below 1; try 1"),
        ({"solver": "eular"}, "did you mean euler"),
        ({"hoists": True}, "switch 'hoists' is unknown; did you mean hoist"),
        ({"hoist": 1}, "hoist 1 is neither True nor False"),
        ({"attention_chunk": 0}, "attention chunk 0 is below 1; try 1"),
        ({"vae_tile": 8}, "vae overlap 8 must be below vae tile 8; try overlap 2, or tile 9"),
        ({"step_cache": -1}, "step cache -1 is below 0; try 0"),
        ({"zero_steps": 2}, "zero steps 2 of 2 leave nothing to draw with; try 1"),
        ({"memory_budget": "much"}, "'much' is no size in bytes"),
        ({"latents": torch.zeros(1, 8, 5, 8, 8)}, r"expected \(1, 8, 2, 8, 8\)"),
    ],
)
def test_bad_arguments(video, settings, message):
    with pytest.raises(ValueError, match=message):
        draw(video, "cat", **settings)


def test_warnings_are_given(video):
    with pytest.warns(EngineWarning, match="negative prompt does nothing at guidance 1") as caught:
        draw(video, "cat", negative_prompt="dog", guidance_scale=1)
    assert caught[0].filename == __file__


# Switches: as for pictures


EXACT = {
    "batched_cfg": False,
    "attention_chunk": 3,
    "vae_batch": 1,
    "vae_tile": 9,
    "latent_buffer": True,
    "prompt_cache": False,
    "hoist": True,
    "compile": True,
    "step_cache": 0.0,
}
SAME_BITS = {"latent_buffer", "prompt_cache", "compile", "step_cache"}  # the compiler of these tests compiles nothing
OTHERS = {
    "step_cache": 0.6,
    "guidance_interval": (0.2, 0.8),
    "guidance_rescale": 0.5,
    "cfg_zero_star": True,
    "zero_steps": 1,
}


@pytest.fixture(scope="module")
def quick(video) -> TextToVideo:
    """The engine with a compiler that hands blocks back as they are."""
    twin = copy.copy(video)
    twin._compiled_blocks = compiled_blocks(lambda forward: forward)
    return twin


def large(engine, **switches):
    """Two clips of 48×32 pixels, 12 × 8 latents: a tile of 9 cuts them."""
    settings = {"seed": 3, "num_inference_steps": 3, "frames": 5, "height": 48, "solver": "multistep"}
    return engine(["cat face, spinning", "火箭"], **settings, **({"vae_overlap": 8} | switches))


@pytest.fixture(scope="module")
def plain(quick):
    return large(quick)


ALONE = [(name,) for name in EXACT]
ALL_BUT_ONE = [tuple(other for other in EXACT if other != name) for name in EXACT]


@pytest.mark.parametrize("on", [*ALONE, *ALL_BUT_ONE, tuple(EXACT)], ids="+".join)
def test_what_must_be_equal_is_equal(quick, plain, on):
    """Every pair of exact switches meets: both on, one on, both off."""
    result = large(quick, **{name: EXACT[name] for name in EXACT if name in on})
    assert result.request.switches.changed.keys() == set(on)
    assert (result.latents - plain.latents).abs().max() < 1e-4
    if set(on) <= SAME_BITS | {"vae_batch", "vae_tile"}:
        assert torch.equal(result.latents, plain.latents)
    for mine, other in zip(result.images, plain.images, strict=True):
        assert ImageChops.difference(mine, other).getextrema() <= ((0, 1),) * 3


@pytest.mark.parametrize("name", OTHERS)
def test_what_makes_another_clip_does_and_exact_switches_leave_it_alone(quick, plain, name):
    other = large(quick, **{name: OTHERS[name]})
    assert not torch.equal(other.latents, plain.latents)
    exact = {"attention_chunk": 3, "hoist": True, "latent_buffer": True, "vae_tile": 9, "vae_batch": 1}
    assert (large(quick, **{name: OTHERS[name]}, **exact).latents - other.latents).abs().max() < 1e-4


def test_switches_reach_the_network_and_the_decoder(quick, monkeypatch):
    twin, seen, decode = copy.copy(quick), [], engines.planned_video_decode
    twin._accelerated = lambda *args: seen.append(args) or AcceleratedVideo(*args)
    monkeypatch.setattr(engines, "planned_video_decode", lambda *args: seen.append(args) or decode(*args))
    for switches in ({}, EXACT):
        large(twin, **switches)
        (dit, sigmas, cache, chunk, run_block), (vae, _, plan) = seen
        assert (dit, vae) == (quick.dit, quick.vae) and (plan.vae_batch, plan.vae_tile) == (
            (1, 9) if switches else (None,) * 2
        )
        assert (sigmas is not None, cache is not None, chunk) == ((True, True, 3) if switches else (False, False, None))
        assert (run_block is quick._compiled_blocks) == bool(switches)
        seen.clear()


def test_a_step_cache_skips_blocks(quick, monkeypatch):
    caches = []

    class Counted(StepCache):
        def __init__(self, *args):
            super().__init__(*args)
            caches.append(self)

    monkeypatch.setattr("diffusion_engine.engine.StepCache", Counted)
    for threshold in (0.0, 9.0):
        draw(quick, "cat", num_inference_steps=5, step_cache=threshold)
    assert [(cache.full, cache.reused) for cache in caches] == [(5, 0), (1, 4)]


def test_switches_of_the_engine_and_of_the_call(tiny_clip_model):
    engine = TextToVideo.from_pretrained(tiny_clip_model, device="cpu", hoist=True, vae_batch=1)
    assert draw(engine, "cat").request.switches.changed == {"hoist": True, "vae_batch": 1}
    assert draw(engine, "cat", hoist=False).request.switches.changed == {"vae_batch": 1}


def test_blocks_are_really_compiled_and_bytes_are_not_counted_then(tiny_clip_model, engine):
    clips, made = TextToVideo.from_pretrained(tiny_clip_model, device="cpu"), []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    clips._compiled_blocks = compiled_blocks(lambda forward: torch.compile(forward, backend=backend))
    result = draw(clips, "cat", compile=True, hoist=True)
    assert (result.latents - draw(clips, "cat").latents).abs().max() < 1e-4
    assert made and result.peak_bytes == {} and result.seconds  # watched operation by operation, nothing is compiled
    for one in (clips, copy.copy(engine)):
        with pytest.warns(EngineWarning, match="compile does nothing while bytes are counted on cpu") as caught:
            one("cat", num_inference_steps=1, compile=True, profile=True)
        assert caught[0].filename == __file__


@pytest.mark.parametrize("options", [{"hoist": True, "vae_tile": 6, "vae_overlap": 2}, OTHERS])
def test_the_record_repeats_the_switches_bit_for_bit(quick, options):
    result = large(quick, **options)
    request = files.request_of(json.loads(result.clips[1][0].info[files.RECORD]))
    assert request == result.request and request.switches.changed.keys() >= options.keys()
    assert [f.tobytes() for f in quick.draw(request).images] == [f.tobytes() for f in result.images]


# Stopping and going on


FAST = {"step_cache": 0.6, "hoist": True, "latent_buffer": True}


@pytest.mark.parametrize(
    ("solver", "options"), [("euler", {}), *((name, FAST) for name in ("euler", "heun", "multistep"))]
)
def test_stopped_and_resumed_is_uninterrupted(video, solver, options):
    settings = {"solver": solver, "num_inference_steps": 5, "num_videos_per_prompt": 2, **options}
    whole = draw(video, "cat", **settings)
    stopped = draw(video, "cat", **settings, callback=lambda info: info.step < 3)
    for profile in (False, True):  # twice: resuming spends nothing
        steps = []
        resumed = video(resume=stopped, callback=lambda info, steps=steps: steps.append(info.step), profile=profile)
        assert steps == [4, 5]
        assert torch.equal(resumed.latents, whole.latents) and len(resumed.clips) == 2
        assert [f.tobytes() for f in resumed.images] == [f.tobytes() for f in whole.images]
        assert resumed.clips[1][0].info == whole.clips[1][0].info and bool(resumed.seconds) != profile


def test_resume_takes_nothing_else(video, engine):
    stopped = draw(video, "cat", callback=lambda info: False)
    for settings in (
        {"seed": 1},
        {"frames": 5},
        {"num_videos_per_prompt": 2},
        {"latents": stopped.latents},
        {"memory_budget": "2 GB"},
        {"hoist": True},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(settings))} given with resume"):
            video(resume=stopped, **settings)
    with pytest.raises(ValueError, match="expected the Result"):
        video(resume="yesterday")
    with pytest.raises(ValueError, match="resume it where it began"):
        video(resume=engine("red apple", num_inference_steps=2, callback=lambda info: False))


# Memory


SIZES = [VideoVAEConfig(width=48, narrow=16), VideoVAEConfig(4, 16, 8, 2), VideoVAEConfig(width=128, narrow=8, depth=1)]


@pytest.mark.parametrize("config", SIZES, ids=["like the shipped", "small", "wide"])
@pytest.mark.parametrize(
    ("batch", "sizes", "tile", "overlap"),
    [
        (1, (5, 8, 8), None, 8),
        (2, (1, 8, 12), None, 8),
        (1, (17, 8, 8), 12, 11),
        (2, (9, 16, 12), 10, 5),
        (1, (3, 20, 32), 18, 8),
    ],
)
def test_decoding_takes_what_the_formula_says(config, batch, sizes, tile, overlap):
    vae, z = VideoVAE(config).requires_grad_(False), torch.randn(batch, config.latent_channels, *sizes)
    with LiveBytes() as live:
        planned_video_decode(vae, z, request.Switches(vae_tile=tile, vae_overlap=overlap))
    assert 0.97 < video_decode_bytes(config, sizes, batch, 4, tile, overlap) / live.peak < 1.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("grid", "tokens", "batch"), [((5, 2, 2), 24, 2), ((5, 8, 8), 7, 1), ((2, 4, 4), 200, 3)])
def test_a_forward_takes_what_the_formula_says(dtype, grid, tokens, batch):
    config = VideoDiTConfig(patch=(1, 2, 2), width=64, heads=4, depth=2, text_width=64)
    net, (f, h, w) = VideoDiT(config).requires_grad_(False).to(dtype), grid
    prompt = torch.randn(batch, tokens, 64, dtype=dtype), torch.ones(batch, tokens, dtype=torch.bool)
    with LiveBytes() as live, torch.no_grad():
        x = torch.zeros(batch, 8, f, 2 * h, 2 * w, dtype=dtype)
        given = live.now
        net(x, torch.zeros(batch), *prompt, torch.zeros(batch, 64, dtype=dtype))
    formula = video_activation_bytes(config, grid, tokens, batch, x.element_size())
    assert 0.93 < formula / (live.peak - given) < 1.1


def test_tiles_are_exact_from_two_radii_on_and_time_is_cut_anywhere():
    torch.manual_seed(0)
    vae = VideoVAE(VideoVAEConfig(width=16, narrow=8, depth=1)).requires_grad_(False)
    for weight in vae.parameters():
        weight.normal_(0, 0.1)
    z, radius = torch.randn(2, 8, 6, 12, 10), video_radius(vae.decoder)
    whole, decode = vae.decode(z), lambda **s: planned_video_decode(vae, z, request.Switches(**s))
    pushed = z.clone()
    pushed[..., 0] += 1
    changed = (vae.decode(pushed) != whole).flatten(0, 3).any(dim=0).nonzero().max() + 1  # columns of pixels
    assert radius == 3.5 and changed == 4 * (1 + radius)  # a latent's own pixels, and so far beyond
    for exact in ({"vae_tile": 9, "vae_overlap": 8}, {"vae_batch": 1}, {"vae_tile": 12, "vae_overlap": 0}):
        assert torch.allclose(decode(**exact), whole, atol=1e-5), exact
    assert not torch.allclose(decode(vae_tile=6, vae_overlap=2), whole, atol=1e-4)
    low = z[..., :4, :4]
    parts = planned_video_decode(vae, low, request.Switches(vae_tile=4, vae_overlap=0))
    assert torch.allclose(parts, vae.decode(low), atol=1e-5)  # 4 + 2 frames of latents


def test_a_budget_chooses_what_fits_and_is_kept():
    engine = TextToVideo.from_pretrained(device="cpu")
    settings = {"prompt": "cat", "num_videos_per_prompt": 2, "num_inference_steps": 1, "frames": 65}
    with pytest.raises(ValueError, match=r"10.0 kB cannot hold 2 × 65 frames of 32×32 pixels; try") as caught:
        engine(**settings, memory_budget="10 kB")
    least = re.search(r"try ([\d.]+ [kM]?B)", str(caught.value))[1]
    plain, tight = engine(**settings), engine(**settings, memory_budget=least, profile=True)
    assert tight.request == engine.within(plain.request, engine.plan(plain.request, least))
    assert tight.request.switches.changed.keys() == {"vae_batch", "vae_tile", "vae_overlap"}
    weights = weight_bytes(engine.dit, engine.vae, engine.text_encoder, engine.refiner)
    assert weights + max(tight.peak_bytes.values()) <= parse_bytes(least)
    assert (tight.latents - plain.latents).abs().max() < 1e-4
    for mine, other in zip(tight.images, plain.images, strict=True):
        assert ImageChops.difference(mine, other).getextrema() <= ((0, 1),) * 3
    plan = engine.plan(plain.request, least)
    for stage in ("denoise", "decode"):
        assert 0.75 < tight.peak_bytes[stage] / plan.peak_bytes[stage] <= 1.05
    assert tight.peak_bytes["encode"] <= 1.1 * plan.peak_bytes["encode"]
    assert engine.within(plain.request, engine.plan(plain.request, "2 GB")) == plain.request


def test_a_budget_counts_what_hoisting_and_a_step_cache_keep():
    engine = TextToVideo.from_pretrained(device="cpu")
    settings = {"prompt": "cat", "num_videos_per_prompt": 2, "num_inference_steps": 6, "hoist": True, "step_cache": 0.0}
    with pytest.raises(ValueError, match="cannot hold") as caught:
        engine(**settings, memory_budget="10 kB")
    least = re.search(r"try ([\d.]+ [kM]?B)", str(caught.value))[1]
    tight = engine(**settings, memory_budget=least, profile=True)
    assert weight_bytes(*engine.parts) + max(tight.peak_bytes.values()) <= parse_bytes(least)


def planned(budget, **changes):
    """A network much hungrier than its decoder."""
    parts = {"dit": VideoDiTConfig(width=1024, patch=(1, 2, 2)), "vae": VideoVAEConfig(width=16, narrow=4)}
    job = {"frames": 33, "height": 256, "width": 128, "text_tokens": 20, "batch": 3, "weights": 1000}
    return plan_video_memory(budget, **(parts | job | changes))


def test_a_plan_gives_up_as_little_as_it_must():
    free = planned("50 GB")
    assert (free.batched_cfg, free.attention_chunk, free.vae_batch, free.vae_tile) == (True, None, None, None)
    need = {stage: 1000 + int(RESERVE * count) + 1 for stage, count in free.peak_bytes.items()}
    assert need["denoise"] > need["decode"] > need["encode"]
    assert planned(need["denoise"]) == replace(free, budget=need["denoise"], reasons=planned(need["denoise"]).reasons)
    less = planned(need["denoise"] - 2)
    assert not less.batched_cfg and less.peak_bytes["denoise"] < free.peak_bytes["denoise"] and less.vae_batch is None
    assert "two forwards, instead of" in str(less) and str(less).count("\n") == 2
    with pytest.raises(ValueError, match="cannot hold 3 × 33 frames of 256×128 pixels") as caught:
        planned("1 MB")
    least = planned(re.search(r"try ([\d.]+ [kMG]?B)", str(caught.value))[1])
    assert not least.batched_cfg  # the number that it names is enough
    assert planned("50 GB", guided=False).batched_cfg and "no guidance" in str(planned("50 GB", guided=False))
    wide = planned("50 GB", vae=VideoVAEConfig(narrow=512)).peak_bytes["decode"]
    pieces = [planned(int(1000 + RESERVE * wide * x), vae=VideoVAEConfig(narrow=512)) for x in (0.6, 0.34, 0.3, 0.15)]
    assert [(plan.vae_batch, plan.vae_tile) for plan in pieces[:3]] == [(1, None), (1, None), (1, 63)]
    assert 2 * free.vae_overlap <= pieces[3].vae_tile < 63  # the largest that fits
    assert "1 of 3 clips at a time, in 2×1 tiles that share 12 latents, instead of" in str(pieces[2])
    long = planned("800 MB", vae=VideoVAEConfig(narrow=512), frames=129, height=64, width=64, batch=1)
    assert f"{long.vae_tile} of 33 frames of latents at a time, instead of" in str(long)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": 16}, r"16 frames are not 4k \+ 1; try 13 or 17"),
        ({"height": 36}, "latent height 9 is not a multiple of patch 2; try 8 or 10"),
        ({"budget": 0}, "0 is no size in bytes"),
    ],
)
def test_plans_of_what_cannot_be_drawn(changes, message):
    with pytest.raises(ValueError, match=message):
        planned(**({"budget": "50 GB"} | changes))


def test_pictures_have_one_frame(engine):
    with pytest.raises(ValueError, match="frames 5 is above 1; try 1"):
        request.make_request(engine.config, "cat", frames=5)


# Files


@pytest.fixture(scope="module")
def clip(video):
    return draw(video, "cat face, spinning 猫", seed=3).clips[0]


@pytest.mark.parametrize("suffix", CLIP_SUFFIXES)
def test_a_file_tells_what_made_it(clip, tmp_path, suffix):
    path = save_clip(clip, tmp_path / f"clip{suffix}", scale=2)
    record = read_clip_record(path)
    assert record["kind"] == "clip" and record["request"]["prompts"] == ["cat face, spinning 猫"]
    assert record["request"]["frames"] == 5 and record["request"]["seed"] == 3
    assert animation(clip, suffix, scale=2) == path.read_bytes()  # the same bytes every time


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_frames_come_back(clip, tmp_path, suffix):
    with Image.open(save_clip(clip, tmp_path / f"clip{suffix}", scale=3)) as image:
        frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
        assert image.info["loop"] == 0 and image.info["duration"] == 80
    assert len(frames) == 5 and frames[0].shape == (96, 96, 3)
    for frame, wanted in zip(frames, clip):
        off = np.abs(frame[::3, ::3].astype(int) - np.asarray(wanted)).mean()
        assert off == 0 if suffix == ".webp" else off < 12  # a GIF has 256 colours


def test_an_mp4_plays(clip, tmp_path):
    import imageio.v2 as imageio

    path = save_clip(clip, tmp_path / "clip.mp4", scale=4)
    frames = imageio.mimread(path)
    assert len(frames) == 5 and frames[0].shape == (128, 128, 3)
    assert np.abs(frames[2][::4, ::4].astype(int) - np.asarray(clip[2])).mean() < 25


def test_files_without_a_record(tmp_path, clip):
    bare = [frame.copy() for frame in clip]
    bare[0].info.clear()
    for suffix in CLIP_SUFFIXES:
        (tmp_path / f"bare{suffix}").write_bytes(animation(bare, suffix))
        with pytest.raises(ValueError, match="has no record of what made it"):
            read_clip_record(tmp_path / f"bare{suffix}")
    (tmp_path / "text.gif").write_text("GIF89a, or is it?")
    with pytest.raises(ValueError, match="is not a clip; give a .gif, .webp or .mp4"):
        read_clip_record(tmp_path / "text.gif")
    with pytest.raises(ValueError, match="is not a file"):
        read_clip_record(tmp_path / "none.gif")
    (tmp_path / "odd.gif").write_bytes(animation(marked(bare, '{"request": {}}'), ".gif"))
    with pytest.raises(ValueError, match="damaged record"):
        read_clip_record(tmp_path / "odd.gif")
    with pytest.raises(ValueError, match="suffix '.avi' is unknown|suffix .avi is unknown"):
        animation(bare, ".avi")


def marked(frames, text):
    frames = [frame.copy() for frame in frames]
    frames[0].info[files.RECORD] = text
    return frames


# The model folder


def test_a_folder_survives_a_round_trip(tiny_clip_model):
    model = load_clip_model(tiny_clip_model)
    assert model.config["recommended"] == BEST and len(model.fingerprint) == 16
    assert model.fingerprint != load_clip_model().fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "dit.safetensors").write_bytes(b"12345678"), "dit.safetensors"),
        (lambda f: (f / "refiner.safetensors").unlink(), "refiner.safetensors is missing"),
        (lambda f: rewrite(f, format="diffusion-engine text-to-image 1"), "animate reads"),
        (lambda f: rewrite(f, text={"tokenizer.json": "0"}), "another text encoder"),
        (lambda f: rewrite(f, sha256={}), "has no sha256 of"),
        (lambda f: rewrite(f, vae=None), "has no entry 'vae'"),
        (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
    ],
)
def test_a_damaged_folder(tiny_clip_model, tmp_path, change, message):
    folder = Path(shutil.copytree(tiny_clip_model, tmp_path / "clips"))
    change(folder)
    with pytest.raises(ValueError, match=message):
        check_clip_folder(folder)


def rewrite(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_altered_weights_are_noticed(tiny_clip_model, tmp_path):
    folder = Path(shutil.copytree(tiny_clip_model, tmp_path / "clips"))
    data = bytearray((folder / "vae.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "vae.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="was altered or belongs to another model"):
        load_clip_model(folder)
    with pytest.raises(ValueError, match="does not exist"):
        load_clip_model(tmp_path / "nowhere")


# The command line


@pytest.fixture
def run(tmp_path, monkeypatch, tiny_clip_model, capsys):
    """run(*args) → (exit code, stdout, stderr), in an empty folder, on the tiny clip model."""
    monkeypatch.chdir(tmp_path)

    def call(*args):
        capsys.readouterr()
        extra = ["--model", str(tiny_clip_model)] if args[0] == "animate" else []
        code = main([*map(str, args), *extra])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.mark.parametrize("suffix", CLIP_SUFFIXES)
def test_draw_show_and_draw_again(run, tmp_path, suffix):
    given = ("cat face, spinning", "-o", f"cat{suffix}", "--steps", 2, "--seed", 5, "--negative", "模糊", "--scale", 3)
    code, out, err = run("animate", *given)
    assert (code, out) == (0, f"cat{suffix}\n")
    assert "1 × 5 frames, 2 steps" in err and "memory: weights" in err and "decode" in err.split("memory")[1]
    code, out, _ = run("show", f"cat{suffix}")
    assert code == 0 and all(
        text in out for text in ("cat face", "模糊", "seed       5", "32×32, 5 frames", "animate --like")
    )
    code, out, err = run("animate", "--like", f"cat{suffix}", "-o", f"again{suffix}")
    assert code == 0 and "every byte" in err
    assert (tmp_path / f"again{suffix}").read_bytes() == (tmp_path / f"cat{suffix}").read_bytes()


def test_a_trace_has_a_sheet_for_every_step_and_ends_in_the_clip(run, tmp_path):
    assert run("animate", "cat", "-o", "c.gif", "--steps", 2, "--frames", 5, "--trace", "t.gif")[0] == 0
    with Image.open(tmp_path / "t.gif") as trace, Image.open(tmp_path / "c.gif") as clip:
        assert trace.n_frames == 2 and trace.size == (5 * 64, 64)  # the last preview is the clip: GIF joins the two
        trace.seek(1)
        first = np.asarray(trace.convert("RGB"), int)[:, :64]
        drawn = np.asarray(clip.convert("RGB").resize((64, 64), Image.Resampling.NEAREST), int)
    assert np.abs(first - drawn).mean() < 16  # both are palettes of one picture


def test_several_and_a_contact_sheet(run, tmp_path):
    code, out, _ = run("animate", "火箭", "-o", "r.webp", "--steps", 1, "--count", 2, "--sheet", "s.png", "--frames", 9)
    assert code == 0 and out.split() == ["r_0.webp", "r_1.webp", "s.png"]
    with Image.open(tmp_path / "s.png") as sheet, Image.open(tmp_path / "r_1.webp") as clip:
        assert sheet.size == (9 * 128, 2 * 128)
        clip.seek(8)
        last = np.asarray(clip.convert("RGB"))
        assert np.array_equal(np.asarray(sheet)[128:, 8 * 128 :], last)
    code, _, err = run("animate", "--like", "r_1.webp", "-o", "again.webp")
    assert code == 0 and "every byte" in err


SWITCHES = {
    "exact": "--hoist --no-batched-cfg --attention-chunk 3 --latent-buffer --no-prompt-cache --vae-tile 6 --vae-overlap 3 "
    "--vae-batch 1".split(),
    "other": "--step-cache 0.6 --guidance-interval 0.1,0.9 --guidance-rescale 0.5 --cfg-zero-star --zero-steps 1".split(),
    "budget": ["--memory-budget", "1 GB"],
}


@pytest.mark.parametrize("kind", SWITCHES)
def test_switches_are_kept_in_the_record_and_repeated(run, tmp_path, kind):
    code, _, err = run("animate", "cat", "-o", "a.webp", "--steps", 3, "--count", 2, *SWITCHES[kind])
    assert code == 0 and ("plan: budget" in err) == (kind == "budget"), err
    changed = files.request_of(read_clip_record(tmp_path / "a_1.webp")).switches.changed
    assert bool(changed) == (kind != "budget")
    code, out, _ = run("show", "a_1.webp")
    assert code == 0 and all(f"{name} " in out for name in changed)
    code, _, err = run("animate", "--like", "a_1.webp", "-o", "b.webp")
    assert code == 0 and "every byte" in err
    assert (tmp_path / "a_1.webp").read_bytes() == (tmp_path / "b.webp").read_bytes()


def test_a_tight_budget_is_told_and_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["animate", "cat", "-o", "a.webp", "--steps", "1", "--count", "2", "--device", "cpu", "--memory-budget"]
    assert main([*given, "1 MB"]) == 2 and not list(tmp_path.iterdir())
    err = capsys.readouterr().err
    assert "1.00 MB cannot hold 2 × 17 frames of 32×32 pixels" in err
    assert main([*given, re.search(r"try ([\d.]+ MB)", err)[1], "--profile"]) == 0
    err = capsys.readouterr().err
    assert "1 of 2 clips at a time, instead of" in err and "bytes, not time" in err
    assert files.request_of(read_clip_record(tmp_path / "a_0.webp")).switches.vae_batch == 1
    assert main(["animate", "--like", "a_0.webp", "-o", "b.webp"]) == 0 and "every byte" in capsys.readouterr().err


def test_profile_tells_bytes_alone(run, tmp_path):
    code, out, err = run("animate", "cat", "-o", "a.webp", "--steps", 2, "--profile")
    assert (code, out) == (0, "a.webp\n") and "memory: weights" in err and "bytes, not time" in err
    code, _, err = run("animate", "cat", "-o", "b.webp", "--steps", 2)
    assert code == 0 and "memory: weights" in err and re.search(r"1 × 5 frames, 2 steps on cpu: encode [\d.]+ s", err)
    assert (tmp_path / "a.webp").read_bytes() == (tmp_path / "b.webp").read_bytes()


def test_animate_has_every_option_of_generate():
    import inspect

    from diffusion_engine import cli

    one, other = (inspect.signature(command).parameters for command in (cli.generate, cli.animate))
    assert one.keys() <= other.keys() and other.keys() - one.keys() == {"frames", "scale", "sheet"}
    assert set(cli.SWITCH_OPTIONS) <= other.keys()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-o", "a.gif"), "a prompt is missing"),
        (("cat", "-o", "a.png"), "output a.png has the suffix .png; try a.gif or a.webp or a.mp4"),
        (("cat", "-o", "no/a.gif"), "does not exist"),
        (("cat", "-o", "a.gif", "--frames", "16"), "16 frames are not 4k + 1; try 13 or 17"),
        (("cat", "-o", "a.gif", "--steps", "x"), "steps 'x' is not a whole number"),
        (("cat", "-o", "a.gif", "--scale", "0"), "scale 0 is below 1"),
        (("cat", "-o", "a.gif", "--trace", "t.png"), "output t.png has the suffix .png; try t.gif"),
        (("cat", "-o", "a.gif", "--sheet", "s.gif"), "output s.gif has the suffix .gif; try s.png"),
        (("cat", "-o", "a.gif", "--device", "gpu"), "device 'gpu' is unknown"),
        (("cat", "--like", "a.gif"), "--like repeats everything that made a clip"),
        (("--like", "a.gif", "--hoist"), "--like repeats everything that made a clip"),
        (("--like", "a.gif", "--no-batched-cfg"), "--like repeats everything that made a clip"),
        (("--like", "a.gif", "--memory-budget", "2 GB"), "--like repeats everything that made a clip"),
        (("cat", "-o", "a.gif", "--attention-chunk", "0"), "attention chunk 0 is below 1; try 1"),
        (("cat", "-o", "a.gif", "--vae-tile", "6"), "try overlap 1, or tile 9"),
        (("cat", "-o", "a.gif", "--step-cache", "some"), "not a number; try 0.1"),
        (("cat", "-o", "a.gif", "--guidance-interval", "0.9,0.1"), "is empty"),
        (("cat", "-o", "a.gif", "--memory-budget", "much"), "no size in bytes"),
        (("cat", "-o", "a.gif", "--memory-budget", "1 kB"), "1.00 kB cannot hold 1 × 5 frames of 32×32 pixels; try"),
        (("--like", "a.gif"), "a.gif is not a file"),
        (("cat", "--frame", "3"), "no such option"),
    ],
)
def test_mistakes_are_named_in_one_line(run, tmp_path, args, message):
    code, out, err = run("animate", *args)
    assert code == 2 and out == "" and message.lower() in err.lower() and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_clip_of_another_model(run, clip, tmp_path):
    other = json.loads(clip[0].info[files.RECORD]) | {"model": "0123456789abcdef"}
    (tmp_path / "other.gif").write_bytes(animation(marked(clip, json.dumps(other)), ".gif"))
    code, _, err = run("animate", "--like", "other.gif", "-o", "a.gif")
    assert code == 2 and "was drawn by model 0123456789abcdef" in err


def test_mistakes_are_named_before_torch_is_imported(tmp_path):
    code = "import sys; from diffusion_engine.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, "animate", "cat", "--frames", "16"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ, check=False)
    assert found.stdout.split() == ["2", "False"] and "13 or 17" in found.stderr


# What ships


def test_the_shipped_model_draws_what_it_was_asked_for():
    """One clip offline, from the package, in fp32 on the CPU; the quality report has them all."""
    engine = TextToVideo.from_pretrained(device="cpu")
    result = engine("cat face, moving left", num_inference_steps=8)
    assert len(result.clips[0]) == 17 and result.clips[0][0].size == (32, 32)
    centre = [float((255 - np.asarray(f.convert("L"), float)).sum(0) @ np.arange(32)) for f in result.clips[0]]
    mass = [float((255 - np.asarray(f.convert("L"), float)).sum()) for f in result.clips[0]]
    first, last = centre[0] / mass[0], centre[-1] / mass[-1]
    assert first - last > 5  # pixels to the left
    assert sum((SHIPPED_CLIP_MODEL / name).stat().st_size for name in CLIP_WEIGHTS.values()) <= 30e6
