"""The caption font: a small subset of Noto Sans CJK SC, so that Chinese captions show on a machine without CJK fonts.

    python -m recipes.caption_font /usr/share/fonts/opentype/noto/NotoSansCJK-Regular.ttc

The source is Debian's package ``fonts-noto-cjk`` (1:20220127+repack1-1; 19 MB, SIL Open Font License 1.1). The subset holds
printable ASCII, the punctuation below, every character of the captions that `course.demo` and `recipes.quality` draw, and
the Han characters that stand in at least two Chinese labels of the emoji data: about 150 kB, the same bytes every time under
the pinned fontTools.
"""

import io
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from fontTools import subset
from fontTools.ttLib import TTCollection

from course.demo import PROMPTS
from course.sheet import FONT
from recipes.emoji_data import load_emoji, write_atomic
from recipes.quality import UNSEEN

FACE = "Noto Sans CJK SC"
PUNCTUATION = "，。：；、（）“”…·×→≥≤"


def wanted_characters(labels: list[str]) -> str:
    """The characters of the subset, sorted: ASCII, punctuation, fixed captions, and what two or more labels share."""
    in_labels = Counter(character for label in labels for character in set(label))
    shared = {character for character, count in in_labels.items() if count >= 2}
    ascii_characters = {chr(code) for code in range(32, 127)}
    return "".join(sorted(shared | ascii_characters | set(PUNCTUATION) | set("".join([*PROMPTS, *UNSEEN]))))


def subset_font(collection: Path, characters: str) -> bytes:
    """The face `FACE` of a font collection, reduced to some characters: OpenType bytes.

    Raises:
        ValueError: the collection has no such face, or the face lacks a character.
    """
    faces = {face["name"].getDebugName(4): face for face in TTCollection(collection).fonts}
    if FACE not in faces:
        raise ValueError(f"{collection} holds {', '.join(faces)}; expected {FACE}")
    face = faces[FACE]
    if missing := set(characters) - set(map(chr, face.getBestCmap())):
        raise ValueError(f"{FACE} has no glyph for {''.join(sorted(missing))}")
    face.recalcTimestamp = False  # the same bytes on every day
    options = subset.Options(hinting=False, layout_features=[], name_IDs=[0, 1, 2, 3, 4, 5, 6, 13, 14])
    subsetter = subset.Subsetter(options)
    subsetter.populate(text=characters)
    subsetter.subset(face)
    buffer = io.BytesIO()
    face.save(buffer)
    return buffer.getvalue()


def main(collection: Annotated[Path, typer.Argument(help="NotoSansCJK-Regular.ttc")], output: Path = FONT) -> None:
    """Write the subset."""
    characters = wanted_characters([record.label_zh for record in load_emoji().records])
    data = subset_font(collection, characters)
    write_atomic(output, data)
    typer.echo(f"{output}: {len(characters)} characters, {len(data):,} bytes")


if __name__ == "__main__":
    typer.run(main)
