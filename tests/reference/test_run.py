"""Whole pipelines on tiny random weights: our loop against diffusers' own, every family; the command line."""

import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion_engine.cli import main
from diffusion_engine.reference.families import FAMILIES
from diffusion_engine.reference.run import Order, Parts, draw, draw_theirs, encode, latent_shape, needs
from diffusion_engine.reference.tiny import write_tiny

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict:
    home = tmp_path_factory.mktemp("pipelines")
    return {name: write_tiny(name, home / name, seed=3) for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loop_is_theirs(name, folders):
    """Latents to 1e-4, pictures to 1/255: not square, with guidance, another seed."""
    frames = 17 if FAMILIES[name].is_clip else 1
    order = Order(prompt="x", negative="y", seed=11, steps=4, guidance=2.5, height=96, width=64, frames=frames)
    ours = draw(Parts(folders[name], name), order)
    latents, pictures = draw_theirs(Parts(folders[name], name), order)
    assert (ours.latents - latents).abs().max() < 1e-4
    assert len(pictures) == len(ours.images) == frames
    assert max(np.abs(np.subtract(a, b, dtype=int)).max() for a, b in zip(pictures, ours.images)) <= 1


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_made_ahead_is_made_once_and_changes_nothing(name, folders, monkeypatch):
    """One making for all steps and both sides of guidance, and latents equal to 1e-4."""
    kind, made, ran = FAMILIES[name].kind, [], []
    hoist, forward = kind.hoist, kind.forward
    monkeypatch.setattr(kind, "hoist", lambda *args, **more: made.append(len(args[2])) or hoist(*args, **more))
    monkeypatch.setattr(kind, "forward", lambda *args, **more: ran.append(1) or forward(*args, **more))
    order = Order(negative="y", seed=4, steps=3, height=64, width=96, frames=9 if FAMILIES[name].is_clip else 1)
    plain = draw(Parts(folders[name], name), order).latents
    assert not made and ran
    ran.clear()
    ahead = draw(Parts(folders[name], name, hoist=True), order).latents
    assert made == [3] and not ran
    assert torch.allclose(ahead, plain, atol=1e-4)


def test_halves_are_multiplied_in_fp32_where_the_processor_cannot(folders, monkeypatch):
    order = Order(steps=1, height=64, width=64)
    exact = draw(Parts(folders["sd3"], "sd3"), order).latents
    monkeypatch.setattr("diffusion_engine.reference.run.multiplies", lambda dtype: dtype == torch.float32)
    parts = Parts(folders["sd3"], "sd3", dtype=torch.bfloat16)
    assert parts.upcast and not Parts(folders["sd3"], "sd3").upcast
    off = (draw(parts, order).latents - exact).std() / exact.std()
    assert parts.get("transformer").image_in.weight.dtype == torch.bfloat16 and 1e-5 < off < 0.05


def test_the_books_are_the_counted_ones():
    """Weights of every part as ``recipes/models.py`` counts them from the configurations, the tokens, too."""
    import json
    from pathlib import Path

    counted = json.loads((Path(__file__).resolve().parents[2] / "notes" / "models.json").read_text(encoding="utf-8"))
    names = ("sd35_medium", "flux_dev", "sana", "wan_1b", "ltx", "cogvideox_5b", "hunyuan_video")
    for (name, family), entry in zip(FAMILIES.items(), (counted[key] for key in names), strict=True):
        facts, order = family.facts, Order().within(family)
        assert facts[2:6] == (entry["weights_b"], entry["encoders_b"], entry["vae_b"], entry["width"]), name
        assert (order.height, order.width, order.frames) == (entry["height"], entry["picture_width"], entry["frames"])
        assert (order.steps, order.guidance) == (entry["steps"], entry["guidance"])
        assert needs(facts, order, batch=1, itemsize=1).denoise == 12 * entry["width"] * entry["tokens"], name


def test_the_books_know_the_networks():
    from diffusion_engine.reference.sd3 import SD3, SD3Config
    from diffusion_engine.reference.wan import Wan, WanConfig

    medium = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "qk_norm": "rms_norm"}
    medium |= {"dual_attention_layers": tuple(range(13)), "pos_embed_max_size": 384}
    small = {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}
    with torch.device("meta"):
        built = {"sd3": SD3(SD3Config(**medium)), "wan": Wan(WanConfig(**small))}
        built |= {name: family.kind(family.kind.Config()) for name, family in FAMILIES.items() if name in DEFAULT}
    for name, model in built.items():
        count = sum(weight.numel() for weight in model.parameters())
        assert abs(FAMILIES[name].facts.transformer * 1e9 / count - 1) < 0.01, name


DEFAULT = ("sana", "ltx", "hunyuan_video")  # whose released model has the configuration's defaults


@pytest.mark.parametrize("name", FAMILIES)
def test_words_reach_the_picture(name, folders):
    """Every word counts, the last one, too; so does the negative prompt, where there is one."""
    parts, frames = Parts(folders[name], name), 9 if FAMILIES[name].is_clip else 1
    order = Order(prompt="red apple", steps=2, guidance=3.0, height=64, width=96, frames=frames)
    drawn = {text: draw(parts, replace(order, prompt=text)).latents for text in ("red apple", "red car")}
    assert (drawn["red apple"] - drawn["red car"]).abs().max() > 1e-4
    away = draw(parts, replace(order, negative="dark")).latents
    assert torch.equal(away, drawn["red apple"]) == FAMILIES[name].embedded


def test_prompts_are_read_without_a_graph(folders):
    for name in FAMILIES:
        read = encode(Parts(folders[name], name), ("a cat", ""))
        assert not any(x.requires_grad for side in read if side is not None for x in side), name
        assert (read[1] is None) == FAMILIES[name].embedded


def test_a_folder_without_text_encoders_says_so(folders, tmp_path):
    home = shutil.copytree(folders["sana"], tmp_path / "deaf", ignore=shutil.ignore_patterns("text_encoder"))
    with pytest.raises(
        ValueError, match="deaf holds no text_encoder to read the prompt; try a whole pipeline's folder"
    ):
        draw(Parts(home, "sana"), Order(steps=1, height=64, width=96))


def test_words_that_are_cut_off_are_told(folders, caplog):
    encode(Parts(folders["sd3"], "sd3"), ("a red apple", ""))
    assert "truncated" not in caplog.text
    encode(Parts(folders["sd3"], "sd3"), ("a red apple " * 40 + "on a zebra", ""))
    assert "truncated" in caplog.text and "on a zebr" in caplog.text


@pytest.mark.parametrize("name", FAMILIES)
def test_bad_sizes_are_named(name, folders):
    with pytest.raises(ValueError, match="width 97 is not a multiple of .*try"):
        draw(Parts(folders[name], name), Order(steps=1, height=64, width=97, frames=1))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.is_clip])
def test_bad_frames_are_named(name, folders):
    near = {"ltx": "8k \\+ 1; try 1 or 9"}.get(name, "4k \\+ 1; try 5 or 9")
    with pytest.raises(ValueError, match=f"8 frames are not {near}"):
        draw(Parts(folders[name], name), Order(steps=1, height=64, width=96, frames=8))


def test_a_picture_has_one_frame(folders):
    with pytest.raises(ValueError, match="frames 5 are too many for a family that draws pictures; try 1"):
        latent_shape(Parts(folders["sd3"], "sd3"), Order(height=64, width=96, frames=5))


def test_another_scheduler_is_not_followed_in_silence(folders, tmp_path):
    home = shutil.copytree(folders["cogvideox"], tmp_path / "dpm")
    file = home / "scheduler" / "scheduler_config.json"
    file.write_text(file.read_text().replace("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"))
    with pytest.raises(ValueError, match="CogVideoXDPMScheduler is not followed"):
        draw(Parts(home, "cogvideox"), Order(steps=1, height=64, width=96, frames=1))


def test_the_command_draws_a_clip(tmp_path, capfd):
    output = tmp_path / "x.webp"
    assert main(["reference", "ltx", "--tiny", "--steps", "2", "--compare", "--hoist", "-o", str(output)]) == 0
    with Image.open(output) as clip:
        assert clip.size == (96, 64) and clip.n_frames == 9
    assert "2 of 255" not in (err := capfd.readouterr().err) and "12 tokens, pictures 9 of (96, 64)" in err


def test_the_command_draws_and_compares(tmp_path, capfd):
    output = tmp_path / "x.png"
    assert main(["reference", "sana", "--tiny", "--steps", "2", "--compare", "--profile", "-o", str(output)]) == 0
    out, err = capfd.readouterr()
    assert Image.open(output).size == (96, 64) and output.with_suffix(".svg").read_text().startswith("<svg")
    assert "compare: largest difference to diffusers" in err and "text (1, 300, 24)" in err and "cut" not in err
    assert str(output) in out


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["nothing"], "nothing' is unknown"),
        ([], "(none)' is unknown"),
        (["sd3", "--steps", "0"], "steps 0"),
        (["sd3", "--model", "acme/none"], "not in the cache"),
        (["sd3", "--model", "no such thing"], "neither a folder nor a hub id"),
        (["sd3", "--tiny", "--width", "100"], "width 100 is not a multiple"),
        (["wan", "--tiny", "--frames", "6"], "6 frames are not 4k + 1; try 5 or 9"),
        (["sd3", "--tiny", "--frames", "5"], "frames 5 are too many"),
    ],
)
def test_mistakes_are_one_line(arguments, needle, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    output = tmp_path / ("x.gif" if "wan" in arguments else "x.png")
    assert main(["reference", *arguments, "-o", str(output)]) == 2
    err = capfd.readouterr().err
    assert needle in err and not output.exists()


def test_the_list_says_what_is_blocked(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main(["reference", "--list"]) == 0
    out = capfd.readouterr().out
    for name, family in FAMILIES.items():
        assert name in out and family.facts.hub in out and family.facts.licence in out
    assert out.count("blocked: no weights here") == len(FAMILIES)


def test_the_command_knows_the_families():
    """It names them without importing torch, so they stand there once more."""
    from diffusion_engine import cli

    assert [*cli.PICTURE_FAMILIES, *cli.CLIP_FAMILIES] == list(FAMILIES)
    assert [name for name, family in FAMILIES.items() if family.is_clip] == list(cli.CLIP_FAMILIES)


def test_help_needs_no_torch():
    code = "import sys; from diffusion_engine.cli import main; main(['reference', '--help']); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
