"""One output with two faces: a live widget in JupyterLab, pre-rendered frames that move by mouse and keyboard elsewhere.

``slider(draw, values, label="…", alt="…")`` ends a cell as ``figures.show`` does. The stored notebook keeps the frames
alone: widgets are taken out when a chapter is stored. Where scripts are stripped (GitHub, an untrusted notebook, paper)
the first frame stands there as a picture.
"""

import base64
import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import display
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from course import figures

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
MOST = 24  # frames; six to twelve are enough for most
BAR = "|"  # keeps the frames' texts and pictures apart in the page
SHOWN = 520  # pixels: about as wide as a picture that is no figure is shown
# Moves the frame, its alt text and the value shown. It runs from a file and in a trusted notebook; no <script> is needed.
MOVE = (
    "var d=this.dataset,i=+this.value,f=this.closest('.slider'),m=f.querySelector('img'),t=d.texts.split('|')[i];"
    "m.src=d.frames.split('|')[i];m.alt=d.alts.split('|')[i];f.querySelector('output').textContent=t;"
    "this.setAttribute('aria-valuetext',t)"
)
STRIPPED = "One of {count} pictures. Run the cell in JupyterLab, or open the course's site, to move the slider."


@dataclass(frozen=True)
class Frame:
    """One position of a slider: the value as shown, the picture as a data URI, its alt text, its size on the page."""

    text: str
    uri: str
    alt: str
    width: int
    height: int


def slider(
    draw: Callable[[Any], Figure | Any],
    values: Sequence,
    *,
    label: str,
    alt: str | Callable[[Any], str],
    start: int = 0,
    text: str | Callable[[Any], str] = "{:g}",
    live: Sequence | None = None,
    colors: int | None = 64,
    zoom: int | None = None,
) -> None:
    """Show what ``draw`` makes of a value that the reader moves.

    In JupyterLab a cell that ran shows a widget. It steps through the frames, which costs nothing; with ``live`` it
    moves through those values instead and calls ``draw`` for each that is reached. Everywhere else the frames move
    without a kernel, by mouse and arrow keys.

    Args:
        draw: value → a matplotlib figure (closed afterwards), or a picture that `figures.as_picture` reads (`tiles`
            puts several into one). All frames must have one size; keep axes limits fixed, or the eye compares the
            wrong thing.
        values: the pre-rendered positions, 2 … 24 (six to twelve keep a notebook small), in the order of the slider.
        label: what moves, in English or as a symbol: ``"σ"``, ``"guidance w"``.
        alt: one English sentence that tells what a frame shows; ``{}`` in it becomes the value's text. Or value →
            sentence.
        start: index of the frame that stands there at first, and alone where nothing moves.
        text: how a value is shown, a format or value → text.
        live: finer values for JupyterLab, where ``draw`` is quick (about 0.2 s); it should hold ``values[start]``.
        colors: of the palette that all frames share, without loss. None for what a network painted: WebP with a
            little loss, half as large; only the first frame is a PNG of 256 colours.
        zoom: how many times its own size a frame is shown; by default figures once, small pictures so often that they
            are about 520 pixels wide. It costs no byte.

    Raises:
        ValueError: too few or too many values, ``start`` outside them, an empty alt text, frames of different sizes.

    Example:
        >>> slider(lambda k: plot_shift(k), [1, 2, 3, 5, 8], label="shift k", alt="The curve of shift {} above the diagonal.")
    """
    values = list(values)
    if not 2 <= len(values) <= MOST:
        raise ValueError(f"{len(values)} values; a slider needs 2 to {MOST}, and six to twelve keep the notebook small")
    if not 0 <= start < len(values):
        raise ValueError(f"start {start} is no index of {len(values)} values; try 0 to {len(values) - 1}")
    frames = make_frames(draw, values, alt, text, colors, zoom, start)
    if live is None:
        face = stepping_face(frames, label, start)
    else:
        face = live_face(
            lambda value: make_frames(draw, [value], alt, text, 256, zoom)[0], live, values[start], label, text
        )
    bundle = {
        WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": face.model_id},
        "text/html": static_face(frames, label, start),
        "text/plain": f"slider: {label}, {frames[0].text} to {frames[-1].text}, {len(frames)} pictures",
    }
    display(bundle, raw=True)


# --- frames ----------------------------------------------------------------------------------------------------------


def make_frames(
    draw: Callable,
    values: Sequence,
    alt: str | Callable,
    text: str | Callable = "{:g}",
    colors: int | None = 64,
    zoom: int | None = None,
    start: int = 0,
) -> list[Frame]:
    """Draw every value: opaque pictures of one size that share a palette. The one at ``start`` is a PNG, for any reader.

    Raises:
        ValueError: see `slider`.
    """
    texts = [_said(text, value) for value in values]
    alts = [_described(alt, value, said) for value, said in zip(values, texts)]
    if barred := [said for said in texts + alts if BAR in said]:
        raise ValueError(f"{barred[0]!r} holds {BAR}, which keeps the frames apart; write it without")
    drawn = [draw(value) for value in values]
    figure, pictures = isinstance(drawn[0], Figure), [render(each) for each in drawn]
    sizes = {picture.size for picture in pictures}
    if len(sizes) > 1:
        found = ", ".join(f"{width}×{height}" for width, height in sorted(sizes))
        raise ValueError(f"frames of sizes {found}; one size for all: set figsize, or pictures of one shape")
    ((width, height),) = sizes
    zoom = zoom or (1 if figure else max(1, round(SHOWN / width)))
    if colors is None:
        uris = [data_uri(picture, quality=85) for picture in pictures]
        uris[start] = data_uri(pictures[start].quantize(256, dither=Image.Dither.NONE))
    else:
        reduced = share_palette(pictures, colors)
        uris = [data_uri(picture, any_format=place != start) for place, picture in enumerate(reduced)]
    return [Frame(*each, width * zoom, height * zoom) for each in zip(texts, uris, alts)]


def render(drawn: Figure | Any) -> Image.Image:
    """A figure or a picture as opaque RGB; a figure is closed."""
    if isinstance(drawn, Figure):
        canvas = FigureCanvasAgg(drawn)
        canvas.draw()
        plt.close(drawn)
        return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    array = figures.as_picture(drawn)
    picture = Image.fromarray(array if array.dtype == np.uint8 else (array * 255).round().astype(np.uint8))
    if picture.mode == "RGBA":
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")


def tiles(images: Sequence, columns: int | None = None, gap: int = 4) -> Image.Image:
    """Pictures of one size side by side on white, to be one frame.

    Args:
        images: what `figures.as_picture` reads.
        columns: pictures a row; all by default.
        gap: pixels between them.

    Raises:
        ValueError: no pictures, or pictures of different sizes.
    """
    pictures = [render(image) for image in images]
    if len({picture.size for picture in pictures}) != 1:
        raise ValueError(f"{len(pictures)} pictures of sizes {[p.size for p in pictures]}; one size, and at least one")
    width, height = (side + gap for side in pictures[0].size)
    columns = columns or len(pictures)
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * width - gap, rows * height - gap), "white")
    for place, picture in enumerate(pictures):
        sheet.paste(picture, (place % columns * width, place // columns * height))
    return sheet


def share_palette(pictures: Sequence[Image.Image], colors: int) -> list[Image.Image]:
    """The pictures in one palette, made from all of them, so that no colour changes from frame to frame.

    Colours that cover much (paper, ink, lines) stay exactly as they are, the rest become means of what remains.
    """
    pixels = np.concatenate([np.asarray(picture.convert("RGB")) for picture in pictures])
    codes = pixels.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
    unique, places, counts = np.unique(codes, return_inverse=True, return_counts=True)
    order = np.argsort(-counts.astype(np.int64), kind="stable")[: colors // 2]
    common = unique[order][counts[order] * 2000 > codes.size]
    palette = _channels(unique if len(unique) <= colors else common)
    if len(unique) > colors:
        others = pixels[~np.isin(codes, common)][None]
        means = Image.fromarray(others).quantize(colors - len(common), dither=Image.Dither.NONE).getpalette()
        palette = np.concatenate([palette, np.array(means, np.int32).reshape(-1, 3)])[:colors]
    nearest = [_nearest(part, palette) for part in np.array_split(_channels(unique), 1 + len(unique) // 4096)]
    indices = np.concatenate(nearest)[places].reshape(codes.shape)
    reduced = []
    for part in np.split(indices.astype(np.uint8), len(pictures)):
        reduced.append(Image.fromarray(np.ascontiguousarray(part), mode="P"))
        reduced[-1].putpalette(palette.astype(np.uint8).tobytes())
    return reduced


def _channels(codes: np.ndarray) -> np.ndarray:
    """Colours 0xRRGGBB as (N, 3)."""
    return np.stack([codes >> 16, codes >> 8 & 255, codes & 255], axis=-1).astype(np.int32)


def _nearest(colours: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """The place in the palette (P, 3) that is nearest to each colour (N, 3)."""
    return ((colours[:, None] - palette) ** 2).sum(-1).argmin(-1)


def data_uri(picture: Image.Image, any_format: bool = False, quality: int | None = None) -> str:
    """A picture inside an address: a PNG; the smaller of PNG and WebP without loss; or WebP of some quality."""
    if quality is not None:
        coded = [_encoded(picture, "webp", quality=quality, method=4)]
    else:
        coded = [_encoded(picture, "png", optimize=True)]
        if any_format:
            coded.append(_encoded(picture.convert("RGB"), "webp", lossless=True, quality=75, method=4))
    name, data = min(coded, key=lambda entry: len(entry[1]))
    return f"data:image/{name};base64,{base64.b64encode(data).decode()}"


def _encoded(picture: Image.Image, name: str, **options: Any) -> tuple[str, bytes]:
    buffer = io.BytesIO()
    picture.save(buffer, format=name, **options)
    return name, buffer.getvalue()


def _said(text: str | Callable[[Any], str], value: Any) -> str:
    """A value as its text; a format for numbers leaves words as they are."""
    if callable(text):
        return text(value)
    return value if isinstance(value, str) and text == "{:g}" else text.format(value)


def _described(alt: str | Callable[[Any], str], value: Any, said: str) -> str:
    sentence = (alt(value) if callable(alt) else alt.replace("{}", said)).strip()
    if not sentence:
        raise ValueError(f"the alt text for {said} is empty; say in one sentence what the picture shows")
    return sentence


# --- the two faces ---------------------------------------------------------------------------------------------------


def static_face(frames: Sequence[Frame], label: str, start: int = 0) -> str:
    """HTML without a script: a picture, and a range input that carries all frames and changes the picture itself."""
    first = frames[start]
    texts, alts = [frame.text for frame in frames], [frame.alt for frame in frames]
    control = {"type": "range", "min": 0, "max": len(frames) - 1, "step": 1, "value": start, "autocomplete": "off"}
    control |= {"aria-valuetext": first.text, "data-texts": BAR.join(texts), "data-alts": BAR.join(alts)}
    control |= {"data-frames": BAR.join(frame.uri for frame in frames), "data-lm-suppress-shortcuts": "true"}
    control |= {"oninput": MOVE, "style": "flex:1;min-width:6em"}
    return (
        f'<figure class="slider" lang="en" style="margin:0;width:{first.width}px;max-width:100%">'
        f"<img{_attributes(src=first.uri, alt=first.alt, width=first.width, height=first.height)}"
        ' style="display:block;max-width:100%;height:auto">'
        '<figcaption style="display:flex;gap:.8em;align-items:center;padding:.4em 0">'
        f'<label style="display:flex;flex:1;gap:.8em;align-items:center"><span>{html.escape(label)}</span> '
        f"<input{_attributes(**control)}></label> "
        f'<output style="min-width:{max(map(len, texts))}ch">{html.escape(first.text)}</output></figcaption>'
        f"<noscript>{STRIPPED.format(count=len(frames))}</noscript></figure>"
    )


def _attributes(**named: Any) -> str:
    return "".join(f' {name}="{html.escape(str(value), quote=True)}"' for name, value in named.items())


def stepping_face(frames: Sequence[Frame], label: str, start: int = 0) -> widgets.Widget:
    """A widget that steps through frames that are there already."""
    return _face([frame.text for frame in frames], lambda place: frames[place], label, start)


def live_face(
    look: Callable[[Any], Frame], values: Sequence, first: Any, label: str, text: str | Callable = "{:g}"
) -> widgets.Widget:
    """A widget that asks ``look`` for each value that is reached, once; it begins nearest to ``first``."""
    values, seen = list(values), {}

    def frame(place: int) -> Frame:
        if place not in seen:
            seen[place] = look(values[place])
        return seen[place]

    begin = min(range(len(values)), key=lambda place: _far(values[place], first))
    return _face([_said(text, value) for value in values], frame, label, begin)


def _far(value: Any, other: Any) -> float:
    """How far two values are apart; words are either the same or not."""
    try:
        return abs(float(value) - float(other))
    except (TypeError, ValueError):
        return float(value != other)


def _face(texts: Sequence[str], look: Callable[[int], Frame], label: str, start: int) -> widgets.Widget:
    """A picture over a slider whose value is the place of a frame."""
    picture = widgets.HTML(_picture(look(start)))
    control = widgets.SelectionSlider(
        options=[(text, place) for place, text in enumerate(texts)],
        value=start,
        description=label,
        layout=widgets.Layout(width="36em", max_width="100%"),
        style={"description_width": "initial"},
    )

    def move(change: dict) -> None:
        picture.value = _picture(look(change["new"]))

    control.observe(move, names="value")
    return widgets.VBox([picture, control])


def _picture(frame: Frame) -> str:
    return f'<img{_attributes(src=frame.uri, alt=frame.alt, width=frame.width)} style="max-width:100%">'
