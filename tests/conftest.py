"""A tiny model folder with random weights, made once a session: everything runs on it, nothing depends on its quality."""

import os
import shutil
from pathlib import Path

import pytest

SHIPPED = Path(__file__).resolve().parents[1] / "diffusion_engine" / "assets" / "model"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side; read when torch is first imported
WORDS = ["red apple", "smiling cat", "blue heart", "rocket in the night sky", "火箭", "彩虹", "红苹果", "戴帽子的猫"]


@pytest.fixture(scope="session")
def tiny_parts():
    """dit, vae and text encoder of a few thousand weights each, none of them zero, and a tokenizer."""
    import torch

    from diffusion_engine.dit import DiT, DiTConfig
    from diffusion_engine.text_conditioning import TextEncoder, TextEncoderConfig, train_tokenizer
    from diffusion_engine.vae import VAE, VAEConfig

    tokenizer = train_tokenizer(WORDS, 320)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = {
            "dit": DiT(DiTConfig(width=32, heads=2, joint_depth=1, parallel_depth=1, text_width=32)),
            "vae": VAE(VAEConfig(width=16, encoder_depth=1, decoder_depth=1)),
            "text_encoder": TextEncoder(TextEncoderConfig(vocab_size=320, width=32, heads=2, depth=1, max_length=12)),
        }
        for module in parts.values():  # AdaLN-Zero would make v = 0 and hide every fault
            for weight in module.parameters():
                if not weight.any():
                    torch.nn.init.normal_(weight, std=0.1)
    return {
        **{name: part.eval().requires_grad_(False) for name, part in parts.items()},
        "tokenizer": tokenizer.to_str(),
    }


@pytest.fixture(scope="session")
def tiny_model(tiny_parts, tmp_path_factory) -> Path:
    """The folder; treat it as read-only."""
    from diffusion_engine.model_folder import save_model

    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_model(folder, **tiny_parts, recommended={"guidance_scale": 3.0, "shift": 1.5, "height": 64, "width": 64})
    return folder


@pytest.fixture
def tiny_model_folder(tiny_model, tmp_path) -> Path:
    """A copy of the folder that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "tiny"))


@pytest.fixture(scope="session")
def engine(tiny_model):
    """An engine on the tiny model."""
    from diffusion_engine import TextToImage

    return TextToImage.from_pretrained(tiny_model, device="cpu")


@pytest.fixture(scope="session")
def shipped_model() -> Path:
    """The model that ships with the package; skips only while the assets are missing, and fails then on CI."""
    if not (SHIPPED / "config.json").is_file():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{SHIPPED} holds no model")
        pytest.skip(f"{SHIPPED} holds no model yet")
    return SHIPPED
