"""How well the shipped clip model knows its own clips, in English and in Chinese.

    python -m recipes.clip_quality              # writes diffusion_engine/assets/clip_model/quality.json
    python -m recipes.clip_quality --limit 56   # a quick look; writes out/clip_quality.json

It measures memorisation, and says so: every caption it draws was trained on. Four parts:

* the VAE alone: PSNR of each clip of the data set against itself encoded, decoded and rounded to 8 bits;
* retrieval: one clip for each still emoji and language, with the seven motions in turn (28 steps, seed 0, recommended
  guidance). The nearest clip of the whole data set, Euclidean distance in the VAE's scaled latent space, answers twice: is
  it this emoji, and is it this motion? Pictures that are equal pixel for pixel count as one emoji;
* drawn clips: the same for the captions of the clips that people drew;
* smoothness: mean absolute difference between neighbouring frames, and of those differences, beside the data's own.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor
from tqdm import tqdm

from diffusion_engine import TextToVideo
from diffusion_engine.files import write_files
from diffusion_engine.model_folder import SHIPPED_CLIP_MODEL
from diffusion_engine.pipeline import initial_noise
from diffusion_engine.vae import psnr
from recipes.clip_data import FRAMES, MOTIONS, STILLS, Clip, as_floats, caption, clip_data, to_bytes

LANGUAGES = ("en", "zh")
STEPS, SEED = 28, 0
BARS = {"vae_psnr_db": 28.0, "emoji": 0.80, "motion": 0.80}
ABOUT = (
    "Memorisation, not generalisation: every caption drawn here was a training caption, and a clip is right when the clip "
    "nearest to it in the VAE's latent space shows the emoji, or the motion, that the caption names."
)


def chosen_clips(language: str, limit: int | None = None) -> list[int]:
    """Rows of the data set: each still once, its motion the next of the seven; Chinese begins one motion later."""
    count, shift = len(STILLS), LANGUAGES.index(language)
    rows = [count * ((i + shift) % len(MOTIONS)) + i for i in range(count)]
    return rows if limit is None or limit >= count else [rows[i * count // limit] for i in range(limit)]


def nearest_clips(latents: Tensor, bank: Tensor) -> list[int]:
    """The row of the bank nearest to each of the latents."""
    return torch.cdist(latents.flatten(1).double(), bank.flatten(1).double()).argmin(dim=1).tolist()


def rates(found: Sequence[Clip], wanted: Sequence[Clip]) -> dict:
    """Shares of right emoji and right motions, over all and for each motion, and the misses by name."""
    emoji = [f.record.same_as == w.record.same_as for f, w in zip(found, wanted)]
    motion = [f.motion == w.motion for f, w in zip(found, wanted)]
    by_motion = {}
    for name in dict.fromkeys(w.motion for w in wanted):
        rows = [i for i, w in enumerate(wanted) if w.motion == name]
        shares = {
            key: round(sum(hits[i] for i in rows) / len(rows), 4)
            for key, hits in (("emoji", emoji), ("motion", motion))
        }
        by_motion[name] = {"count": len(rows), **shares}
    return {
        "count": len(wanted),
        "emoji": round(sum(emoji) / len(emoji), 4),
        "motion": round(sum(motion) / len(motion), 4),
        "both": round(sum(e and m for e, m in zip(emoji, motion)) / len(emoji), 4),
        "by_motion": by_motion,
        "misses": [
            [caption(w, "en"), caption(f, "en")] for f, w, e, m in zip(found, wanted, emoji, motion) if not (e and m)
        ],
    }


def smoothness(clips: Tensor) -> dict[str, float]:
    """Mean |x_{t+1} − x_t| and mean |x_{t+1} − 2 x_t + x_{t−1}| of clips (N, 3, T, H, W) in −1…1."""
    first = clips.diff(dim=2)
    return {"step": round(first.abs().mean().item(), 4), "jerk": round(first.diff(dim=2).abs().mean().item(), 4)}


def encode_all(vae, clips: Tensor, batch: int) -> tuple[Tensor, np.ndarray]:
    """Scaled latents of all clips, and the PSNR of each encoded, decoded and rounded."""
    latents, decibels = [], []
    with torch.inference_mode():
        for part in tqdm(clips.split(batch), desc="VAE", unit="batch"):
            z = vae.encode(as_floats(part))
            latents.append(z)
            decibels.append(psnr(as_floats(to_bytes(vae.decode(z))), as_floats(part)))
    return torch.cat(latents), torch.cat(decibels).numpy()


def draw_latents(engine: TextToVideo, prompts: Sequence[str], batch: int, name: str) -> Tensor:
    """One clip for each prompt, all from the noise of seed 0: latents (N, C, F, h, w)."""
    noise, drawn = initial_noise([SEED], engine.latent_shape(32, 32, FRAMES)), []
    with tqdm(total=len(prompts), desc=f"drawing {name}", unit="clip", mininterval=1) as bar:
        for start in range(0, len(prompts), batch):
            part = list(prompts[start : start + batch])
            result = engine(part, num_inference_steps=STEPS, latents=noise.repeat(len(part), 1, 1, 1, 1))
            drawn.append(result.latents.float())
            bar.update(len(part))
    return torch.cat(drawn)


def passed(report: dict) -> dict[str, bool]:
    """Which of the bars are met; retrieval in both languages."""
    found = {"vae_psnr_db": report["vae"]["mean_psnr_db"]}
    for key in ("emoji", "motion"):
        found[key] = min(report["retrieval"][language][key] for language in LANGUAGES)
    return {key: found[key] >= bar for key, bar in BARS.items()}


def main(
    limit: Annotated[int | None, typer.Option(help="draw only this many stills; a quick look", min=1)] = None,
    batch: Annotated[int, typer.Option(help="clips at a time", min=1)] = 64,
    output: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
) -> None:
    """Measure the shipped clip model and write the JSON."""
    output = output or (SHIPPED_CLIP_MODEL / "quality.json" if limit is None else Path("out/clip_quality.json"))
    begun, engine, (clips, told) = time.perf_counter(), TextToVideo.from_pretrained(device="cpu"), clip_data()
    bank, decibels = encode_all(engine.vae, clips, batch)
    worst = int(decibels.argmin())
    report = {
        "about": ABOUT,
        "settings": {"steps": STEPS, "guidance": engine.guidance_scale, "seed": SEED, "dtype": "float32"},
        "data": {
            "clips": len(told),
            "stills": len(STILLS),
            "motions": len(MOTIONS),
            "drawn": sum(c.motion == "animated" for c in told),
        },
        "weights_sha256": engine.config["sha256"],
        "bars": BARS,
        "vae": {
            "clips": len(decibels),
            "mean_psnr_db": round(float(decibels.mean()), 2),
            "fifth_percentile_db": round(float(np.percentile(decibels, 5)), 2),
            "worst_db": round(float(decibels.min()), 2),
            "worst_clip": caption(told[worst], "en"),
            "by_motion": {
                name: round(float(decibels[[i for i, c in enumerate(told) if c.motion == name]].mean()), 2)
                for name in dict.fromkeys(c.motion for c in told)
            },
        },
        "retrieval": {},
        "drawn_clips": {},
    }
    for language in LANGUAGES:
        rows = chosen_clips(language, limit)
        latents = draw_latents(engine, [caption(told[row], language) for row in rows], batch, language)
        report["retrieval"][language] = rates([told[i] for i in nearest_clips(latents, bank)], [told[i] for i in rows])
        if language == "en":
            with torch.inference_mode():
                drawn = torch.cat([engine.vae.decode(part).clamp(-1, 1) for part in latents.split(batch)])
            report["smoothness"] = {"drawn": smoothness(drawn), "data": smoothness(as_floats(clips[rows]))}
        rows = [i for i, c in enumerate(told) if c.motion == "animated"][: limit and limit // 4 + 1]
        latents = draw_latents(engine, [caption(told[row], language) for row in rows], batch, f"{language}, animated")
        report["drawn_clips"][language] = rates(
            [told[i] for i in nearest_clips(latents, bank)], [told[i] for i in rows]
        )
    report["passed"] = passed(report)
    report["minutes"] = round((time.perf_counter() - begun) / 60, 1)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_files({output: (json.dumps(report, ensure_ascii=False, indent=1) + "\n").encode()})
    for line in summary(report):
        typer.echo(line)
    typer.echo(f"{output}")


def summary(report: dict) -> list[str]:
    """The report in a few lines."""
    vae = report["vae"]
    lines = [f"VAE: mean PSNR {vae['mean_psnr_db']:.2f} dB over {vae['clips']} clips (bar {BARS['vae_psnr_db']:.0f})"]
    for language in LANGUAGES:
        scores, drawn = report["retrieval"][language], report["drawn_clips"][language]
        lines.append(
            f"{language}: emoji right {scores['emoji']:.1%} (bar {BARS['emoji']:.0%}), motion right {scores['motion']:.1%} "
            f"(bar {BARS['motion']:.0%}), both {scores['both']:.1%} of {scores['count']}; drawn clips: emoji {drawn['emoji']:.1%}"
        )
    smooth = report["smoothness"]
    lines.append(f"smoothness: step {smooth['drawn']['step']} (data {smooth['data']['step']}), jerk {smooth['drawn']['jerk']} (data {smooth['data']['jerk']})")  # fmt: skip
    return [*lines, "memorisation: " + ("every bar met" if all(report["passed"].values()) else "below a bar")]


if __name__ == "__main__":
    typer.run(main)
