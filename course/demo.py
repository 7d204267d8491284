"""``make demo``: two English and two Chinese prompts become pictures, four seeds each, on one captioned sheet.

    python -m course.demo --output out/demo.png

Row "red apple" is what ``diffusion-engine generate "red apple" --count 4`` draws.
"""

import io
import time
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from course.sheet import Row, contact_sheet
from diffusion_engine import TextToImage
from diffusion_engine.files import write_files

PROMPTS = ("red apple", "smiling cat", "火箭", "彩虹")
SEEDS = range(4)


def draw_rows(engine: TextToImage, prompts: tuple[str, ...] = PROMPTS, steps: int = 28) -> list[Row]:
    """Draw every prompt with seeds 0 … 3 at the recommended guidance, with a progress bar on stderr."""
    rows = []
    shape = "{desc:12}{bar} {n}/{total} steps, {remaining} left"
    with tqdm(total=len(prompts) * steps, bar_format=shape, disable=None) as bar:

        def advance(*_) -> None:  # a callback that returned False would cancel
            bar.update()

        for prompt in prompts:
            bar.set_description(prompt)
            count = len(SEEDS)
            result = engine(
                prompt, num_inference_steps=steps, seed=SEEDS[0], num_images_per_prompt=count, callback=advance
            )
            rows.append(Row(prompt, result.images))
    return rows


def main(
    output: Annotated[Path, typer.Option(help="where the sheet goes")] = Path("out/demo.png"), steps: int = 28
) -> None:
    """Draw the demonstration sheet."""
    begun = time.perf_counter()
    rows = draw_rows(TextToImage.from_pretrained(), steps=steps)
    sheet = contact_sheet(rows, headers=[f"seed {seed}" for seed in SEEDS])
    output.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    sheet.save(buffer, format="png", optimize=True)
    write_files({output: buffer.getvalue()})
    pictures = sum(len(row.pictures) for row in rows)
    typer.echo(f"{output}: {pictures} pictures of {len(rows)} prompts in {time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":
    typer.run(main)
