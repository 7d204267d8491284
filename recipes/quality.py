"""``make quality``: how well the shipped model knows its own 1,911 pictures, in English and in Chinese.

    python -m recipes.quality               # everything; writes diffusion_engine/assets/model/quality.json
    python -m recipes.quality --limit 64    # a quick look; writes out/quality.json

It measures memorisation, and says so: every caption it draws was trained on. Three parts:

* the VAE alone: PSNR of each picture against itself encoded, decoded and rounded to 8 bits;
* retrieval: for each label one picture (28 steps, seed 0, recommended guidance). Its latents are compared with those of all
  pictures of the data set, Euclidean distance in the VAE's scaled latent space. The label is right when the nearest picture
  is its own, or one that equals its own pixel for pixel. Such equal pictures take one place in the ranking;
* prompts outside the labels, drawn and shown beside the JSON, with the picture of the data set nearest to each.
"""

import io
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

from course.sheet import Row, contact_sheet
from diffusion_engine import TextToImage
from diffusion_engine.files import write_files
from diffusion_engine.model_folder import SHIPPED_MODEL
from diffusion_engine.pipeline import initial_noise
from diffusion_engine.vae import psnr
from recipes.emoji_data import EmojiRecord, load_emoji

LANGUAGES = ("en", "zh")
KINDS = ("other", "flag", "clock")
STEPS, SEED, TOP = 28, 0, 5
BARS = {"vae_psnr_db": 32.0, "en": 0.80, "zh": 0.75}
UNSEEN = (
    "green apple",
    "two hearts",
    "戴帽子的猫",
    "blue apple",
    "three hearts",
    "red cat",
    "a cat with a hat",
    "绿色的火箭",
    "蓝色的笑脸",
)  # the first two are labels of the data set; the JSON says which
UNSEEN_SEEDS = range(4)
ABOUT = (
    "Memorisation, not generalisation: every label drawn here was a training caption, and a label is right when the picture "
    "nearest to the drawing, in the VAE's latent space, is the one that the label was trained with."
)


# --- measures ------------------------------------------------------------------------------------------------------------


def decibels(pictures: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio of each pair in dB, for uint8 pictures (N, H, W, 3)."""
    return psnr(as_tensor(pictures), as_tensor(others)).numpy()


def ranking(latents: Tensor, bank: Tensor, top: int = TOP) -> tuple[Tensor, Tensor]:
    """The nearest rows of the bank for each of the latents, nearest first: Euclidean distances and indices, (N, top) each."""
    distances = torch.cdist(latents.flatten(1).double(), bank.flatten(1).double())
    return torch.topk(distances, min(top, len(bank)), largest=False, sorted=True)


def rates(hits: Tensor, kinds: Sequence[str]) -> dict:
    """Share of right answers at the first place and among the first five, for all and for each kind.

    Args:
        hits: bool (N, top), whether the picture at each place is the right one.
        kinds: kind of each of the N records.
    """
    found = {}
    for kind in ("all", *KINDS):
        chosen = torch.tensor([kind in ("all", k) for k in kinds])
        count = int(chosen.sum())
        if count:
            first, five = int(hits[chosen, 0].sum()), int(hits[chosen].any(dim=1).sum())
            found[kind] = {
                "count": count,
                "right": first,
                "top1": round(first / count, 4),
                "top5": round(five / count, 4),
            }
    return found


def retrieval(
    latents: Tensor, wanted: Sequence[EmojiRecord], bank: Tensor, records: Sequence[EmojiRecord], label: str
) -> dict:
    """Score drawings against the data set.

    Args:
        latents: one drawing for each wanted record, (N, C, h, w).
        wanted: the records drawn.
        bank: latents of all pictures, in the order of ``records``.
        records: all records.
        label: ``label_en`` or ``label_zh``, for naming the misses.
    """
    distinct = torch.tensor([index for index, record in enumerate(records) if record.same_as == index])
    distances, places = ranking(latents, bank[distinct])
    found = distinct[places]  # (N, top) indices of records
    truth = torch.tensor([record.same_as for record in wanted])
    hits = found == truth[:, None]
    shared = {record.same_as for index, record in enumerate(records) if record.same_as != index}
    right = [record for record, hit in zip(wanted, hits[:, 0].tolist()) if hit]
    kinds = [record.kind for record in wanted]
    answers = [records[index] for index in found[:, 0].tolist()]
    return {
        **rates(hits, kinds),
        "right_through_a_pixel_identical_picture": sum(record.same_as in shared for record in right),
        "right_kind": {
            kind: round(sum(a.kind == kind for a, k in zip(answers, kinds) if k == kind) / kinds.count(kind), 4)
            for kind in KINDS
            if kind in kinds
        },
        "median_distance_when_right": _median(distances[hits[:, 0], 0]),
        "median_distance_when_wrong": _median(distances[~hits[:, 0], 0]),
        "misses": [
            [getattr(record, label), getattr(answer, label)]
            for record, answer, hit in zip(wanted, answers, hits[:, 0].tolist())
            if not hit
        ],
    }


def _median(values: Tensor) -> float | None:
    return round(float(values.median()), 2) if len(values) else None


# --- drawing -------------------------------------------------------------------------------------------------------------


def as_tensor(images: np.ndarray) -> Tensor:
    """uint8 pictures (N, H, W, 3) as the VAE reads them: fp32 (N, 3, H, W) in −1 … 1."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def encode_all(vae, images: np.ndarray, batch: int) -> tuple[Tensor, np.ndarray]:
    """Scaled latents of all pictures, and each picture encoded, decoded and rounded to 8 bits."""
    latents, back = [], []
    with torch.inference_mode():
        for part in tqdm(as_tensor(images).split(batch), desc="VAE", unit="batch"):
            z = vae.encode(part)
            latents.append(z)
            rounded = ((vae.decode(z).float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
            back.append(rounded.permute(0, 2, 3, 1).numpy())
    return torch.cat(latents), np.concatenate(back)


def draw_latents(engine: TextToImage, prompts: Sequence[str], shape: Sequence[int], batch: int, name: str) -> Tensor:
    """One drawing for each prompt, all from the noise of seed 0: latents (N, C, h, w)."""
    noise, drawn = initial_noise([SEED], tuple(shape)), []
    with tqdm(total=len(prompts), desc=f"drawing {name}", unit="picture", mininterval=1) as bar:
        for start in range(0, len(prompts), batch):
            part = list(prompts[start : start + batch])
            result = engine(part, num_inference_steps=STEPS, latents=noise.repeat(len(part), *[1] * (noise.ndim - 1)))
            drawn.append(result.latents.float())
            bar.update(len(part))
    return torch.cat(drawn)


def draw_unseen(engine: TextToImage, bank: Tensor, records: Sequence[EmojiRecord]) -> tuple[list[dict], bytes]:
    """Prompts outside the labels, four seeds each: what came nearest, and the sheet as a PNG."""
    told, rows = [], []
    labels = {label for record in records for label in (record.label_en, record.label_zh)}
    for prompt in tqdm(UNSEEN, desc="unseen", unit="prompt"):
        count = len(UNSEEN_SEEDS)
        result = engine(prompt, num_inference_steps=STEPS, seed=UNSEEN_SEEDS[0], num_images_per_prompt=count)
        distances, places = ranking(result.latents.float(), bank, top=1)
        answers = [records[index].label_en for index in places[:, 0].tolist()]
        trained = prompt in labels
        entry = {"prompt": prompt, "is_a_label_of_the_data": trained, "nearest": answers}
        told.append(entry | {"distances": [round(d, 2) for d in distances[:, 0].tolist()]})
        rows.append(Row(prompt, result.images, "a label of the data" if trained else "never a label"))
    buffer = io.BytesIO()
    contact_sheet(rows, [f"seed {seed}" for seed in UNSEEN_SEEDS]).save(buffer, format="png", optimize=True)
    return told, buffer.getvalue()


# --- everything ----------------------------------------------------------------------------------------------------------


def chosen_records(records: Sequence[EmojiRecord], limit: int | None) -> list[EmojiRecord]:
    """All records, or ``limit`` of them spread evenly over the data set."""
    if limit is None or limit >= len(records):
        return list(records)
    if limit < 1:
        raise typer.BadParameter(f"--limit {limit} is not a positive number of labels; try 64")
    return [records[i * len(records) // limit] for i in range(limit)]


def passed(report: dict) -> dict[str, bool]:
    """Which of the bars are met."""
    found = {"vae_psnr_db": report["vae"]["mean_psnr_db"]} | {
        k: report["retrieval"][k]["all"]["top1"] for k in LANGUAGES
    }
    return {key: found[key] >= bar for key, bar in BARS.items()}


def main(
    limit: Annotated[
        int | None, typer.Option(help="draw only this many labels, spread over the data; a quick look")
    ] = None,
    batch: Annotated[int, typer.Option(help="pictures at a time", min=1)] = 96,
    dtype: Annotated[str, typer.Option(help="of the engine")] = "float32",
    output: Annotated[Path | None, typer.Option(help="where the JSON goes")] = None,
) -> None:
    """Measure the shipped model and write the JSON (and, beside it, the sheet of unseen prompts)."""
    output = output or (SHIPPED_MODEL / "quality.json" if limit is None else Path("out/quality.json"))
    begun = time.perf_counter()
    engine, data = TextToImage.from_pretrained(dtype=dtype), load_emoji()
    bank, back = encode_all(engine.vae, data.images, batch)
    ratios = decibels(back, data.images)
    worst = int(ratios.argmin())
    wanted = chosen_records(data.records, limit)
    report = {
        "about": ABOUT,
        "settings": {
            "steps": STEPS,
            "guidance": engine.guidance_scale,
            "seed": SEED,
            "dtype": dtype,
            "labels": len(wanted),
        },
        "weights_sha256": json.loads((SHIPPED_MODEL / "config.json").read_text(encoding="utf-8")).get("sha256", {}),
        "bars": BARS,
        "vae": {
            "pictures": len(ratios),
            "mean_psnr_db": round(float(ratios.mean()), 2),
            "fifth_percentile_db": round(float(np.percentile(ratios, 5)), 2),
            "worst_db": round(float(ratios.min()), 2),
            "worst_picture": data.records[worst].label_en,
        },
        "retrieval": {},
    }
    for language in LANGUAGES:
        label = f"label_{language}"
        drawn = draw_latents(engine, [getattr(record, label) for record in wanted], bank.shape[1:], batch, language)
        report["retrieval"][language] = retrieval(drawn, wanted, bank, data.records, label)
    report["passed"] = passed(report)
    report["unseen"], sheet = draw_unseen(engine, bank, data.records)
    report["minutes"] = round((time.perf_counter() - begun) / 60, 1)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_files(
        {
            output: (json.dumps(report, ensure_ascii=False, indent=1) + "\n").encode(),
            output.with_name("unseen.png"): sheet,
        }
    )
    for line in summary(report):
        typer.echo(line)
    typer.echo(f"{output}")


def summary(report: dict) -> list[str]:
    """The report in a few lines."""
    vae = report["vae"]
    lines = [
        f"VAE: mean PSNR {vae['mean_psnr_db']:.2f} dB over {vae['pictures']} pictures (bar {BARS['vae_psnr_db']:.0f}), "
        f"worst {vae['worst_db']:.2f} dB ({vae['worst_picture']})"
    ]
    for language in LANGUAGES:
        scores = report["retrieval"][language]
        kinds = ", ".join(f"{kind} {scores[kind]['top1']:.1%}" for kind in KINDS if kind in scores)
        overall = scores["all"]
        lines.append(
            f"{language}: nearest is right for {overall['top1']:.1%} of {overall['count']} labels (bar {BARS[language]:.0%}), "
            f"top five {overall['top5']:.1%}; {kinds}"
        )
    return [*lines, "memorisation: " + ("every bar met" if all(report["passed"].values()) else "below a bar")]


if __name__ == "__main__":
    typer.run(main)
