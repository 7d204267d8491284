"""Whole pipelines on tiny random weights: our loop against diffusers' own, every family; the command line."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion_engine.cli import main
from diffusion_engine.reference.run import FACTS, RECIPES, Order, Parts, draw, draw_theirs, needs, write_tiny

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict:
    home = tmp_path_factory.mktemp("pipelines")
    return {name: write_tiny(name, home / name, seed=3) for name in RECIPES}


@pytest.mark.parametrize("name", RECIPES)
def test_the_loop_is_theirs(name, folders):
    """Latents to 1e-4, pictures to 1/255: not square, with guidance, another seed."""
    order = Order(prompt="x", negative="y", seed=11, steps=4, guidance=2.5, height=96, width=64)
    ours = draw(Parts(folders[name], name), order)
    latents, (picture,) = draw_theirs(Parts(folders[name], name), order)
    assert (ours.latents - latents).abs().max() < 1e-4
    assert np.abs(np.asarray(picture, int) - np.asarray(ours.images[0], int)).max() <= 1


def test_the_books_know_the_networks():
    from diffusion_engine.reference.flux import Flux, FluxConfig
    from diffusion_engine.reference.sana import Sana, SanaConfig
    from diffusion_engine.reference.sd3 import SD3, SD3Config

    medium = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "qk_norm": "rms_norm"}
    medium |= {"dual_attention_layers": tuple(range(13)), "pos_embed_max_size": 384}
    with torch.device("meta"):
        built = {
            "sd3": SD3(SD3Config(**medium)),
            "flux": Flux(FluxConfig(guidance_embeds=True)),
            "sana": Sana(SanaConfig()),
        }
    for name, model in built.items():
        count = sum(weight.numel() for weight in model.parameters())
        assert abs(needs(FACTS[name], 1024, 1024).transformer / (2 * count) - 1) < 0.01


@pytest.mark.parametrize("name", RECIPES)
def test_bad_sizes_are_named(name, folders):
    with pytest.raises(ValueError, match="width 97 is not a multiple of .*try"):
        draw(Parts(folders[name], name), Order(steps=1, height=64, width=97))


def test_the_command_draws_and_compares(tmp_path, capfd):
    output = tmp_path / "x.png"
    assert main(["reference", "sana", "--tiny", "--steps", "2", "--compare", "--profile", "-o", str(output)]) == 0
    out, err = capfd.readouterr()
    assert Image.open(output).size == (96, 64) and output.with_suffix(".svg").read_text().startswith("<svg")
    assert "compare: largest difference to diffusers" in err and "prompt embeddings are drawn" in err
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
    ],
)
def test_mistakes_are_one_line(arguments, needle, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["reference", *arguments, "-o", str(tmp_path / "x.png")]) == 2
    err = capfd.readouterr().err
    assert needle in err and not (tmp_path / "x.png").exists()


def test_the_list_says_what_is_blocked(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main(["reference", "--list"]) == 0
    out = capfd.readouterr().out
    for name, facts in FACTS.items():
        assert name in out and facts.hub in out and facts.licence in out
    assert out.count("blocked: no weights here") == len(FACTS)


def test_help_needs_no_torch():
    code = "import sys; from diffusion_engine.cli import main; main(['reference', '--help']); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
