"""Captioned contact sheets: rows of generated pictures with the prompt beside them, Chinese captions included.

The captions are drawn with a shipped subset of Noto Sans CJK SC (``course/fonts``, SIL Open Font License), so a sheet looks
the same on a machine without any CJK font.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont

FONT = Path(__file__).parent / "fonts" / "NotoSansSC-captions.otf"
INK, FAINT, PAPER = "#1a202c", "#718096", "#ffffff"
CAPTION_SIZE, HEADER_SIZE = 20, 13  # pixels
GAP = 8


class Row(NamedTuple):
    """One line of a sheet: a caption, an optional fainter second line, and pictures from left to right."""

    caption: str
    pictures: Sequence[Image.Image]
    note: str = ""


@lru_cache(maxsize=1)
def covered() -> frozenset[str]:
    """Every character that the shipped font can draw."""
    with TTFont(FONT) as font:
        return frozenset(map(chr, font.getBestCmap()))


def require_glyphs(text: str) -> None:
    """Refuse a text that would show as empty boxes.

    Raises:
        ValueError: the font lacks a character.
    """
    if missing := sorted(set(text) - covered()):
        raise ValueError(
            f"the caption font has no glyph for {''.join(missing)!r} in {text!r}; "
            "add it to the fixed captions and rebuild with: python -m recipes.caption_font"
        )


def contact_sheet(rows: Sequence[Row], headers: Sequence[str] = (), scale: int = 2) -> Image.Image:
    """Lay rows of pictures under column headers, each row's caption on its left.

    Args:
        rows: all pictures of one size; rows may differ in length.
        headers: one a column, or none.
        scale: each picture is enlarged this many times (Lanczos).

    Returns:
        An opaque RGB picture.

    Raises:
        ValueError: no rows, or a caption with a character that the font lacks.
    """
    if not rows:
        raise ValueError("rows is empty; a sheet needs at least one row")
    require_glyphs("".join([*headers, *(row.caption + row.note for row in rows)]))
    caption_font, small_font = (ImageFont.truetype(str(FONT), size) for size in (CAPTION_SIZE, HEADER_SIZE))
    width, height = (side * scale for side in rows[0].pictures[0].size)
    lengths = [max(caption_font.getlength(row.caption), small_font.getlength(row.note)) for row in rows]
    margin = int(max(lengths)) + 4 * GAP
    top = HEADER_SIZE + 2 * GAP if headers else GAP
    columns = max(len(row.pictures) for row in rows)
    sheet = Image.new("RGB", (margin + columns * (width + GAP), top + len(rows) * (height + GAP)), PAPER)
    draw = ImageDraw.Draw(sheet)
    for column, header in enumerate(headers):
        x = margin + column * (width + GAP) + width / 2
        draw.text((x, top / 2), header, fill=FAINT, font=small_font, anchor="mm")
    for index, row in enumerate(rows):
        y = top + index * (height + GAP)
        middle = y + height / 2 - (HEADER_SIZE * 0.7 if row.note else 0)
        draw.text((2 * GAP, middle), row.caption, fill=INK, font=caption_font, anchor="lm")
        if row.note:
            draw.text((2 * GAP, middle + CAPTION_SIZE), row.note, fill=FAINT, font=small_font, anchor="lm")
        for column, picture in enumerate(row.pictures):
            enlarged = picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
            sheet.paste(enlarged, (margin + column * (width + GAP), y))
    return sheet
