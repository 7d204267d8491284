"""The course's one plot style: small opaque PNGs with alt text, and grids of pictures.

Importing it sets the style. ``show(fig, alt="…")`` ends every plot: the text goes into the output's metadata, where the
HTML export finds it for ``<img alt>``.
"""

import io
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from cycler import cycler
from IPython.display import Image, display
from matplotlib.figure import Figure
from PIL import Image as Pictures

WIDTH = 6.4  # inches
DPI = 90
COLORS = ["#2b6cb0", "#dd6b20", "#2f855a", "#c53030", "#6b46c1", "#718096"]
STYLE = {
    "figure.dpi": DPI,
    "figure.figsize": (WIDTH, 3.2),
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "white",
    "savefig.dpi": DPI,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "font.size": 9,
    "legend.frameon": False,
    "image.interpolation": "nearest",
    "lines.linewidth": 1.6,
}
plt.rcParams.update(STYLE)


def png(fig: Figure, colors: int | None = 256) -> bytes:
    """The figure as an opaque PNG.

    Args:
        fig: the figure.
        colors: size of the palette, which makes the file about three times smaller; None keeps every colour.
    """
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", facecolor="white", metadata={"Software": None})
    picture = Pictures.open(buffer).convert("RGB")
    if colors is not None:
        picture = picture.quantize(colors, dither=Pictures.Dither.NONE)
    buffer = io.BytesIO()
    picture.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def show(fig: Figure, alt: str, colors: int | None = 256) -> None:
    """Display a figure once, with its alt text, and close it.

    Args:
        fig: the figure; its message belongs in its title.
        alt: one English sentence that tells what the picture shows to someone who cannot see it.
        colors: see `png`.

    Raises:
        ValueError: ``alt`` is empty, or the figure cuts a title off.
    """
    if not alt.strip():
        raise ValueError("alt is empty; say in one sentence what the picture shows")
    data = png(fig, colors)
    if cut := cut_texts(fig):
        raise ValueError(f"the figure cuts off {cut[0]!r}; shorten it or make the figure wider")
    plt.close(fig)
    display(Image(data=data, format="png", alt=alt.strip()))


def cut_texts(fig: Figure, tolerance: float = 2.0) -> list[str]:
    """Titles and labels of axes that reach beyond the figure's edge by more than ``tolerance`` pixels."""
    texts = [
        text for ax in fig.axes for text in (ax.title, ax._left_title, ax._right_title, ax.xaxis.label, ax.yaxis.label)
    ]
    texts += [fig._suptitle] if fig._suptitle is not None else []
    boxes = {text: text.get_window_extent() for text in texts if text.get_visible() and text.get_text().strip()}
    inside = fig.bbox.padded(tolerance)
    return [t.get_text() for t, b in boxes.items() if b.x0 < inside.x0 or b.x1 > inside.x1 or b.y1 > inside.y1]


def as_picture(image) -> np.ndarray:
    """A picture as (H, W, 3) or (H, W) numbers that matplotlib draws.

    Args:
        image: a tensor or array, (3, H, W), (1, H, W), (H, W, 3) or (H, W); or a PIL picture. Floats are read as 0…1
            and clipped.

    Raises:
        ValueError: another shape.
    """
    if hasattr(image, "detach"):
        image = image.detach().float().cpu()
    array = np.asarray(image)
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[-1] not in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3) or array.ndim == 3 and array.shape[-1] not in (3, 4):
        raise ValueError(f"a picture has shape {array.shape}; expected (3, H, W), (1, H, W), (H, W, 3) or (H, W)")
    return array if array.dtype == np.uint8 else array.clip(0, 1)


def image_grid(
    images: Sequence,
    captions: Sequence[str] | None = None,
    *,
    alt: str,
    columns: int | None = None,
    title: str = "",
    size: float = 1.1,
) -> None:
    """Show pictures side by side, each under its caption.

    Args:
        images: what `as_picture` reads.
        captions: one a picture, or None.
        alt: see `show`.
        columns: pictures a row; at most eight by default.
        title: the message.
        size: inches a picture is wide and high.

    Raises:
        ValueError: no pictures, or not as many captions as pictures.
    """
    count = len(images)
    if not count:
        raise ValueError("images is empty; a grid needs at least one picture")
    if captions is not None and len(captions) != count:
        raise ValueError(f"{len(captions)} captions for {count} pictures; give one each, or None")
    columns = columns or min(count, 8)
    rows = -(-count // columns)
    height = rows * (size + 0.25 * (captions is not None)) + 0.35 * bool(title)
    fig, axes = plt.subplots(rows, columns, figsize=(columns * size, height), squeeze=False)
    for place, ax in enumerate(axes.flat):
        ax.axis("off")
        if place < count:
            ax.imshow(as_picture(images[place]), cmap="gray", vmin=0, vmax=1)
            ax.set_title(captions[place] if captions is not None else "", fontsize=8, loc="center")
    if title:
        fig.suptitle(title, fontsize=10, x=0.01, ha="left")
    show(fig, alt)
