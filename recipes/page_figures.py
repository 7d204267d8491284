"""The figures of the site's pages, drawn by the shipped model and from committed numbers: ``python -m recipes.page_figures``.

Each function draws one figure and gives it back; the command writes ``site/images/NAME.png``.
"""

import json
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

from course.figures import COLORS, plt, png
from diffusion_engine import TextToImage
from recipes.models import NOTES

FOLDER = Path(__file__).parents[1] / "site" / "images"
SHOWN = (0, 3, 6, 9, 13, 18, 27)  # steps of 28


def road() -> Figure:
    """One prompt on its way: the noisy latents' picture above, what the network expects at the end below."""
    engine, kept = TextToImage.from_pretrained(device="cpu"), []
    result = engine("rocket", seed=3, callback=lambda info: kept.append((info.sigma, info.latents, info.data)))
    sigmas = [kept[step][0] for step in SHOWN]
    rows = [torch.cat([kept[step][place] for step in SHOWN]) for place in (1, 2)]
    assert torch.allclose(rows[1][-1], result.latents[0], atol=1e-5)
    fig, axes = plt.subplots(2, len(SHOWN), figsize=(8.4, 2.9))
    for ax, sigma in zip(axes[0], sigmas, strict=True):
        ax.set_title(f"σ = {sigma:.2f}", fontsize=9, loc="center")
    for row, latents in zip(axes, rows, strict=True):
        for ax, image in zip(row, engine.decode(latents), strict=True):
            ax.imshow(image)
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
    for ax, label in zip(axes[:, 0], ("where it is", "where it\nis heading"), strict=True):
        ax.set_ylabel(label, fontsize=9)
    fig.suptitle(
        "“rocket”, 28 steps: outlines are settled long before the noise is gone", fontsize=11, x=0.01, ha="left"
    )
    return fig


def families() -> Figure:
    """Work of one picture or clip against the weights that must be held, from ``notes/models.json``."""
    found = {k: v for k, v in json.loads((NOTES / "models.json").read_text("utf-8")).items() if isinstance(v, dict)}
    fig, ax = plt.subplots(figsize=(7.2, 3.9))
    for video, color, label in ((False, COLORS[0], "one picture, 1024×1024"), (True, COLORS[1], "one clip")):
        rows = [row for row in found.values() if bool(row["time"]) == video]
        ax.scatter(
            [r["bf16_gb"] for r in rows], [r["total_pflop"] for r in rows], color=color, s=46, label=label, zorder=3
        )
        for r in rows:
            size = f"\n{r['frames']} × {r['height']}×{r['picture_width']}" if video else ""
            large = r["bf16_gb"] > 36  # the two at the edge: one label above its point, one below
            place = (6, -9 if r["name"].startswith("Wan") else 9) if large else (8, 0)
            ax.annotate(
                r["name"] + size,
                (r["bf16_gb"], r["total_pflop"]),
                xytext=place,
                textcoords="offset points",
                va=("center" if not large else "top" if place[1] < 0 else "bottom"),
                ha="right" if large else "left",
                fontsize=8,
            )
    ax.set(yscale="log", xlabel="weights of all parts in bf16, GB", ylabel="work of the denoising, PFLOP")
    ax.set(
        xlim=(5, 46),
        ylim=(0.07, 4e3),
        title="A small video model needs less memory than FLUX, and more work",
    )
    ax.grid(axis="y", alpha=0.25)
    ax.legend(loc="upper left")
    return fig


FIGURES = {"road": road, "families": families}


def picture(name: str) -> bytes:
    """One figure as PNG.

    Raises:
        ValueError: no figure of that name.
    """
    if name not in FIGURES:
        raise ValueError(f"no figure {name!r}; try one of {', '.join(FIGURES)}")
    fig = FIGURES[name]()
    data = png(fig)
    plt.close(fig)
    return data


def main(names: list[str]) -> None:
    """Write these figures, or all."""
    for name in names or FIGURES:
        path = FOLDER / f"{name}.png"
        path.write_bytes(picture(name))
        print(f"{path.relative_to(FOLDER.parents[1])}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
