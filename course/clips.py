"""Clips in a notebook: they play by themselves from the output, with the first frame beside them for print.

``play(clips, alt="…")`` ends a cell that shows clips. The output is HTML without a script: an animated WebP, and a still of its
first frame, which the site shows on paper and to those who asked their system for less motion.
"""

import base64
import html
import io
from collections.abc import Sequence

import numpy as np
from IPython.display import HTML, display
from PIL import Image, ImageDraw

from course.figures import as_picture

MILLISECONDS = 90  # a frame
QUALITY = 50  # of moving pictures; twelve small clips must fit into a notebook
GAP, LINE = 6, 14  # pixels between clips, and for a caption


def play(
    clips: Sequence,
    captions: Sequence[str] | None = None,
    *,
    alt: str,
    columns: int | None = None,
    size: int = 96,
    milliseconds: int = MILLISECONDS,
) -> None:
    """Show clips side by side, all with the same clock.

    Args:
        clips: each (3, T, H, W), a tensor in 0…1; or a list of pictures. As many frames in each.
        captions: one a clip, in English (no other script is drawn), or None.
        alt: one English sentence that tells what moves, for someone who cannot see it.
        columns: clips a row; at most six by default.
        size: about how many pixels a clip is wide; small ones are magnified by a whole number.
        milliseconds: how long a frame stays.

    Raises:
        ValueError: no clips, clips of different lengths, no alt text, or not as many captions as clips.
    """
    frames = sheets([frames_of(clip) for clip in clips], captions, columns, size)
    if not alt.strip():
        raise ValueError("alt is empty; say in one sentence what moves")
    display(HTML(markup(frames, alt.strip(), milliseconds)))


def frames_of(clip) -> list[np.ndarray]:
    """A clip's frames as (H, W, 3) bytes."""
    if hasattr(clip, "detach"):
        if clip.ndim != 4:
            raise ValueError(f"a clip has shape {tuple(clip.shape)}; expected (3, T, H, W)")
        clip = clip.detach().transpose(0, 1)
    arrays = [as_picture(frame) for frame in clip]
    return [a if a.dtype == np.uint8 else (a * 255).round().astype(np.uint8) for a in arrays]


def sheets(
    clips: Sequence[list[np.ndarray]], captions: Sequence[str] | None, columns: int | None, size: int
) -> list[Image.Image]:
    """One picture a frame, with every clip in its place."""
    lengths = {len(clip) for clip in clips}
    if len(lengths) != 1:
        raise ValueError(f"clips have {sorted(lengths)} frames; give one clip or more, all of one length")
    if captions is not None and len(captions) != len(clips):
        raise ValueError(f"{len(captions)} captions for {len(clips)} clips; give one each, or None")
    columns = columns or min(len(clips), 6)
    rows, line = -(-len(clips) // columns), LINE if captions is not None else 0
    height, width = (max(1, size // clips[0][0].shape[1]) * side for side in clips[0][0].shape[:2])
    found = []
    for moment in range(lengths.pop()):
        sheet = Image.new("RGB", (columns * (width + GAP) - GAP, rows * (height + line + GAP) - GAP), "white")
        for place, clip in enumerate(clips):
            left, top = place % columns * (width + GAP), place // columns * (height + line + GAP)
            picture = Image.fromarray(clip[moment]).convert("RGB")
            sheet.paste(picture.resize((width, height), Image.Resampling.NEAREST), (left, top + line))
            if captions is not None:
                ImageDraw.Draw(sheet).text((left, top), captions[place], fill="black")
        found.append(sheet)
    return found


def markup(frames: Sequence[Image.Image], alt: str, milliseconds: int) -> str:
    """The clip and its first frame as HTML that needs no script and no other file."""
    moving, still, width = webp(frames, milliseconds), webp(frames[:1], milliseconds), frames[0].width
    said = html.escape(alt)
    return (
        f'<img class="clip-moving" src="{moving}" width="{width}" alt="{said}">'
        f'<img class="clip-still" hidden src="{still}" width="{width}" alt="{said}">'
    )


def webp(frames: Sequence[Image.Image], milliseconds: int) -> str:
    """Frames as one WebP inside an address; several play without an end, one alone is lossless."""
    buffer, several = io.BytesIO(), {}
    if len(frames) > 1:
        several = {"save_all": True, "append_images": frames[1:], "duration": milliseconds, "loop": 0}
    frames[0].save(buffer, format="webp", lossless=not several, method=6, quality=QUALITY, **several)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
