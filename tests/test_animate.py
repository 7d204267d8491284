"""Clips: `TextToVideo`, the `animate` command, and their files, on a tiny clip model with random weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from diffusion_engine import EngineWarning, TextToVideo, files, load_clip_model, request
from diffusion_engine.cli import main
from diffusion_engine.files import CLIP_SUFFIXES, animation, read_clip_record, save_clip
from diffusion_engine.model_folder import CLIP_WEIGHTS, SHIPPED_CLIP_MODEL, check_clip_folder, save_clip_model
from diffusion_engine.pipeline import initial_noise
from diffusion_engine.text_conditioning import TextEncoderConfig
from diffusion_engine.video import TextRefiner, VideoDiT, VideoDiTConfig, VideoVAE, VideoVAEConfig

BEST = {"guidance_scale": 2.0, "num_inference_steps": 28, "shift": 1.5, "height": 32, "width": 32, "frames": 5}


@pytest.fixture(scope="session")
def tiny_clip_model(tmp_path_factory) -> Path:
    """A clip model's folder over the shipped text encoder; treat it as read-only."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = {
            "dit": VideoDiT(VideoDiTConfig(width=24, heads=2, depth=1)),
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
    assert video.draw(result.request, profile=False).peak_bytes == {}


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
        ({"hoist": True}, "hoist is a switch of the picture model; leave it out for clips"),
        ({"vae_tile": 8, "vae_overlap": 2}, "vae_tile is a switch of the picture model"),
        ({"latents": torch.zeros(1, 8, 5, 8, 8)}, r"expected \(1, 8, 2, 8, 8\)"),
    ],
)
def test_bad_arguments(video, settings, message):
    with pytest.raises(ValueError, match=message):
        draw(video, "cat", **settings)


def test_guidance_switches_work_and_warnings_are_given(video):
    plain = draw(video, "cat")
    assert torch.allclose(draw(video, "cat", batched_cfg=False).latents, plain.latents, atol=1e-4)
    assert torch.equal(draw(video, "cat", latent_buffer=True).latents, plain.latents)
    assert not torch.equal(draw(video, "cat", guidance_rescale=0.7).latents, plain.latents)
    with pytest.warns(EngineWarning, match="negative prompt does nothing at guidance 1"):
        draw(video, "cat", negative_prompt="dog", guidance_scale=1)


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
    import shutil

    folder = Path(shutil.copytree(tiny_clip_model, tmp_path / "clips"))
    change(folder)
    with pytest.raises(ValueError, match=message):
        check_clip_folder(folder)


def rewrite(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_altered_weights_are_noticed(tiny_clip_model, tmp_path):
    import shutil

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
