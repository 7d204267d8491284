"""Seven model families side by side, counted from their configurations; writes ``notes/models.json``.

    python -m recipes.models

Nothing is downloaded and no memory is filled: every part is built on torch's meta device, where tensors have shapes and no
numbers. Weights are then counted, and so are the operations of one forward pass at the size that the family's pipeline draws by
default. Where a configuration comes from stands beside it.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import typer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from diffusion_engine.files import write_files

NOTES = Path(__file__).resolve().parents[1] / "notes"
# Text encoders: sizes as in sd3.5's sd3_infer.py (CLIP, T5), Wan2.1's wan/modules/t5.py (umT5), transformers' own default for
# Gemma-2-2B, and Meta's llama-models, sku_list.py, for Llama-3-8B.
CLIP = {"intermediate_size": 3072, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
BIG = {"intermediate_size": 5120, "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 20}
T5 = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
ENCODERS = {  # name → transformers' classes of the model and of its configuration, and the entries of the latter
    "CLIP-L": ("CLIPTextModelWithProjection", "CLIPTextConfig", CLIP | {"projection_dim": 768}),
    "CLIP-G": ("CLIPTextModelWithProjection", "CLIPTextConfig", BIG | {"projection_dim": 1280}),
    "T5-XXL": ("T5EncoderModel", "T5Config", T5 | {"vocab_size": 32128}),
    "umT5-XXL": ("UMT5EncoderModel", "UMT5Config", T5 | {"vocab_size": 256384}),
    "Gemma-2-2B": ("Gemma2Model", "Gemma2Config", {}),
    "Llama-3-8B": ("LlamaModel", "LlamaConfig", LLAMA | {"num_key_value_heads": 8, "vocab_size": 128256}),
}
FOUR = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16}
FOUR |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
FOUR |= {"use_quant_conv": False, "use_post_quant_conv": False}  # sd3.5 and FLUX: scripts/convert_sd3_to_diffusers.py
DEEP = {"latent_channels": 32, "downsample_block_type": "conv", "upsample_block_type": "interpolate"}
DEEP |= {"encoder_layers_per_block": (2, 2, 2, 3, 3, 3), "decoder_layers_per_block": (3,) * 6}
for side in ("encoder", "decoder"):  # scripts/convert_dcae_to_diffusers.py, dc-ae-f32c32-sana-1.0
    DEEP[f"{side}_block_types"] = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3


@dataclass(frozen=True)
class Family:
    """One released model: diffusers' classes, what differs from their defaults, and where that is written.

    Args:
        transformer, vae: class and entries. pipeline: whose defaults say size, steps and guidance.
        encoders: names in `ENCODERS`. text: tokens that the transformer reads. space, time: pixels a latent covers.
        patch: latents a token covers along a side. inputs: the size → the forward's arguments on the meta device.
        embedded: guidance is an input, so that a step is one forward instead of two. size: where the default is not typical.
    """

    name: str
    source: str
    transformer: tuple[str, dict]
    vae: tuple[str, dict]
    pipeline: str
    encoders: tuple[str, ...]
    text: int
    space: int
    patch: int
    inputs: Callable[["Family", int, int, int], dict[str, Tensor]]
    time: int = 0
    embedded: bool = False
    size: dict = field(default_factory=dict)

    def latents(self, height: int, width: int, frames: int) -> tuple[int, int, int]:
        """(frames, rows, columns) of the latents; 1 frame for pictures."""
        return ((frames - 1) // self.time + 1 if self.time else 1), height // self.space, width // self.space


def meta(*shape: int) -> Tensor:
    """A tensor with a shape and nothing else."""
    return torch.zeros(*shape, device="meta")


def joint_pictures(family: Family, height: int, width: int, frames: int) -> dict:
    """SD3: latents as a picture, words of width 4096, a pooled vector."""
    _, h, w = family.latents(height, width, frames)
    given = {"hidden_states": meta(1, 16, h, w), "encoder_hidden_states": meta(1, family.text, 4096)}
    return given | {"pooled_projections": meta(1, 2048), "timestep": meta(1)}


def packed_pictures(family: Family, height: int, width: int, frames: int) -> dict:
    """FLUX: latents packed 2×2, a place for every token, a pooled vector, guidance."""
    _, h, w = family.latents(height, width, frames)
    n = h * w // 4
    given = {"hidden_states": meta(1, n, 64), "encoder_hidden_states": meta(1, family.text, 4096), "guidance": meta(1)}
    given |= {"pooled_projections": meta(1, 768), "timestep": meta(1)}
    return given | {"img_ids": meta(n, 3), "txt_ids": meta(family.text, 3)}


def crossed_pictures(family: Family, height: int, width: int, frames: int) -> dict:
    """Sana: latents of 32 channels, words of Gemma's width."""
    _, h, w = family.latents(height, width, frames)
    words = meta(1, family.text, 2304)
    return {"hidden_states": meta(1, 32, h, w), "encoder_hidden_states": words, "timestep": meta(1)}


def frames_first(family: Family, height: int, width: int, frames: int) -> dict:
    """CogVideoX: (B, T, C, h, w), and the angles of the larger model, which it gets from its pipeline."""
    t, h, w = family.latents(height, width, frames)
    given = {"hidden_states": meta(1, t, 16, h, w), "encoder_hidden_states": meta(1, family.text, 4096)}
    if family.transformer[1].get("use_rotary_positional_embeddings"):
        n = t * h * w // 4
        given["image_rotary_emb"] = (meta(n, 64), meta(n, 64))
    return given | {"timestep": meta(1)}


def crossed_videos(family: Family, height: int, width: int, frames: int) -> dict:
    """Wan: (B, C, T, h, w)."""
    t, h, w = family.latents(height, width, frames)
    words = meta(1, family.text, 4096)
    return {"hidden_states": meta(1, 16, t, h, w), "encoder_hidden_states": words, "timestep": meta(1)}


def joint_videos(family: Family, height: int, width: int, frames: int) -> dict:
    """HunyuanVideo: as Wan's, with a mask over the words, a pooled vector and guidance."""
    given = crossed_videos(family, height, width, frames) | {"pooled_projections": meta(1, 768), "guidance": meta(1)}
    return given | {"encoder_attention_mask": meta(1, family.text).bool()}


def packed_videos(family: Family, height: int, width: int, frames: int) -> dict:
    """LTX-Video: a row of tokens, its grid, a mask over the words."""
    t, h, w = family.latents(height, width, frames)
    given = {"hidden_states": meta(1, t * h * w, 128), "encoder_hidden_states": meta(1, family.text, 4096)}
    given |= {"timestep": meta(1), "encoder_attention_mask": meta(1, family.text)}
    return given | {"num_frames": t, "height": h, "width": w}


SCRIPT = "diffusers, scripts/convert_{}_to_diffusers.py"
SD35 = {"joint_attention_dim": 4096, "qk_norm": "rms_norm"}
COG5 = {"num_layers": 42, "num_attention_heads": 48, "use_rotary_positional_embeddings": True}
COG = ("AutoencoderKLCogVideoX", {})
SIX_SECONDS = {"height": 480, "width": 720, "num_frames": 49}  # CogVideoX: sample_height, sample_width, sample_frames
PICTURE = {"height": 1024, "width": 1024}  # where a pipeline leaves it to the transformer
FAMILIES = {
    "sd35_medium": Family(
        "SD3.5 medium",
        SCRIPT.format("sd3"),
        (
            "SD3Transformer2DModel",
            SD35
            | {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384}
            | {"dual_attention_layers": tuple(range(13))},
        ),
        ("AutoencoderKL", FOUR),
        "StableDiffusion3Pipeline",
        ("CLIP-L", "CLIP-G", "T5-XXL"),
        77 + 256,
        8,
        2,
        joint_pictures,
    ),
    "sd35_large": Family(
        "SD3.5 large",
        SCRIPT.format("sd3"),
        (
            "SD3Transformer2DModel",
            SD35
            | {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192},
        ),
        ("AutoencoderKL", FOUR),
        "StableDiffusion3Pipeline",
        ("CLIP-L", "CLIP-G", "T5-XXL"),
        77 + 256,
        8,
        2,
        joint_pictures,
    ),
    "flux_dev": Family(
        "FLUX.1-dev",
        "black-forest-labs/flux, src/flux/util.py",
        ("FluxTransformer2DModel", {"guidance_embeds": True}),
        ("AutoencoderKL", FOUR),
        "FluxPipeline",
        ("CLIP-L", "T5-XXL"),
        512,
        8,
        2,
        packed_pictures,
        embedded=True,
    ),
    "sana": Family(
        "Sana-1.6B",
        "NVlabs/Sana, SanaMS_1600M_P1_D20 (configs/sana_config/1024ms/Sana_1600M_img1024.yaml)",
        ("SanaTransformer2DModel", {}),
        ("AutoencoderDC", DEEP),
        "SanaPipeline",
        ("Gemma-2-2B",),
        300,
        32,
        1,
        crossed_pictures,
    ),
    "cogvideox_2b": Family(
        "CogVideoX-2B",
        SCRIPT.format("cogvideox"),
        ("CogVideoXTransformer3DModel", {}),
        COG,
        "CogVideoXPipeline",
        ("T5-XXL",),
        226,
        8,
        2,
        frames_first,
        time=4,
        size=SIX_SECONDS,
    ),
    "cogvideox_5b": Family(
        "CogVideoX-5B",
        SCRIPT.format("cogvideox"),
        ("CogVideoXTransformer3DModel", COG5),
        COG,
        "CogVideoXPipeline",
        ("T5-XXL",),
        226,
        8,
        2,
        frames_first,
        time=4,
        size=SIX_SECONDS,
    ),
    "wan_1b": Family(
        "Wan2.1 1.3B",
        "Wan-Video/Wan2.1, wan/configs/wan_t2v_1_3B.py",
        ("WanTransformer3DModel", {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}),
        ("AutoencoderKLWan", {}),
        "WanPipeline",
        ("umT5-XXL",),
        512,
        8,
        2,
        crossed_videos,
        time=4,
    ),
    "wan_14b": Family(
        "Wan2.1 14B",
        "Wan-Video/Wan2.1, wan/configs/wan_t2v_14B.py",
        ("WanTransformer3DModel", {}),
        ("AutoencoderKLWan", {}),
        "WanPipeline",
        ("umT5-XXL",),
        512,
        8,
        2,
        crossed_videos,
        time=4,
        size={"height": 720, "width": 1280},
    ),
    "hunyuan_video": Family(
        "HunyuanVideo",
        "Tencent/HunyuanVideo, hyvideo/modules/models.py",
        ("HunyuanVideoTransformer3DModel", {}),
        ("AutoencoderKLHunyuanVideo", {}),
        "HunyuanVideoPipeline",
        ("CLIP-L", "Llama-3-8B"),
        256,
        8,
        2,
        joint_videos,
        time=4,
        embedded=True,
    ),
    "ltx": Family(
        "LTX-Video 2B",
        SCRIPT.format("ltx"),
        ("LTXVideoTransformer3DModel", {}),
        ("AutoencoderKLLTXVideo", {}),
        "LTXPipeline",
        ("T5-XXL",),
        128,
        32,
        1,
        packed_videos,
        time=8,
    ),
}


def build(library: str, kind: str, entries: dict) -> nn.Module:
    """A part of diffusers on the meta device."""
    module = __import__(library)
    with torch.device("meta"):
        return getattr(module, kind)(**entries).eval()


def encoder(name: str) -> nn.Module:
    """A text encoder of transformers on the meta device."""
    import transformers

    kind, config, entries = ENCODERS[name]
    with torch.device("meta"):
        return getattr(transformers, kind)(getattr(transformers, config)(**entries))


def weights(module: nn.Module) -> int:
    """How many numbers a part holds."""
    return sum(weight.numel() for weight in module.parameters())


def flops(module: nn.Module, given: dict) -> int:
    """Operations of the matrix products and convolutions of one forward, attention's included."""
    counter = FlopCounterMode(display=False)
    with torch.device("meta"), counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        module(**given)
    return counter.get_total_flops()


def defaults(family: Family) -> dict[str, float]:
    """Size, steps and guidance that the family's pipeline takes when nothing is said."""
    import diffusers

    given = inspect.signature(getattr(diffusers, family.pipeline).__call__).parameters
    found = {key: given[key].default for key in ("height", "width", "num_frames") if key in given}
    sizes = PICTURE | {key: value for key, value in found.items() if value is not None} | family.size
    place = {"height": sizes["height"], "picture_width": sizes["width"], "frames": sizes.get("num_frames", 1)}
    steps, guidance = (given[key].default for key in ("num_inference_steps", "guidance_scale"))
    return place | {"steps": steps, "guidance": guidance}


def count(key: str) -> dict:
    """Everything about one family."""
    family = FAMILIES[key]
    chosen = defaults(family)
    place = chosen["height"], chosen["picture_width"], chosen["frames"]
    net, vae = (build("diffusers", *part) for part in (family.transformer, family.vae))
    words = [weights(encoder(name)) for name in family.encoders]
    config, (t, h, w) = net.config, family.latents(*place)
    blocks = [str(config[name]) for name in ("num_layers", "num_single_layers") if name in config]
    work, forwards = flops(net, family.inputs(family, *place)), chosen["steps"] * (1 if family.embedded else 2)
    parts = [weights(net), weights(vae), *words]
    return {
        "name": family.name,
        "source": family.source,
        "blocks": " + ".join(blocks),
        "width": config["num_attention_heads"] * config["attention_head_dim"],
        "heads": config["num_attention_heads"],
        "weights_b": round(weights(net) / 1e9, 3),
        "encoders": ", ".join(family.encoders),
        "encoders_b": round(sum(words) / 1e9, 3),
        "vae_b": round(weights(vae) / 1e9, 3),
        "bf16_gb": round(2 * sum(parts) / 1e9, 1),
        "largest_gb": round(2 * max(parts) / 1e9, 1),
        "space": family.space,
        "time": family.time,
        "patch": family.patch,
        "channels": vae.config.get("latent_channels") or vae.config["z_dim"],
        **chosen,
        "tokens": t * h * w // family.patch**2,
        "text_tokens": family.text,
        "forward_tflop": round(work / 1e12, 2),
        "flop_per_weight_byte": round(work / (2 * weights(net))),
        "forwards": forwards,
        "total_pflop": round(forwards * work / 1e15, 2),
    }


def main(folder: Path = NOTES) -> None:
    """Count all families."""
    import diffusers

    found = {"diffusers": diffusers.__version__} | {key: count(key) for key in FAMILIES}
    write_files({folder / "models.json": (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode()})
    typer.echo(f"{folder / 'models.json'}")


if __name__ == "__main__":
    typer.run(main)
