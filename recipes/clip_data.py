"""The clip data set: 17 frames of 32×32, each clip with an English and a Chinese caption.

    python -m recipes.clip_data         # builds diffusion_engine/assets/clips/ from two npm packages

Two kinds of clips:

* procedural: a still emoji of the shipped data (`recipes.emoji_data`) moved by one of seven rules (`MOTIONS`). They are
  rendered when they are needed, always to the same bytes, and cost nothing in the repository;
* animated: clips drawn by people, 17 evenly spaced frames of each, in one lossless WebP sheet (``frames.webp``: a clip a row)
  with ``clips.json`` beside it (hexcodes, sources, SHA-256 of the pixels).

Sources and licences (this notice travels with the data):

* stills: Noto Emoji by Google, Apache License 2.0; captions: emojibase (MIT) from Unicode CLDR (Unicode License);
* animations: Fluent Emoji by Microsoft, MIT License, taken from npm ``@lobehub/fluent-emoji-anim-1@1.0.0`` and
  ``@lobehub/fluent-emoji-anim-2@1.0.0`` (MIT License).
"""

from __future__ import annotations

import io
import json
import math
import tarfile
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import typer
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from recipes.emoji_data import (
    CACHE,
    EmojiRecord,
    Package,
    fetch_package,
    join_key,
    load_emoji,
    over_white,
    pixels_sha256,
    write_atomic,
)

SIZE, FRAMES = 32, 17
ASSETS = Path(__file__).resolve().parents[1] / "diffusion_engine" / "assets" / "clips"
SHEET, LIST = "frames.webp", "clips.json"
REBUILD = "build it with: python -m recipes.clip_data"

PACKAGES = (
    Package(
        "@lobehub/fluent-emoji-anim-1",
        "1.0.0",
        "4c03ac178c1eabf2e2a16dd498f3cc2b92dc30ec3466ae38fdc497d4774c99ea",
        "MIT (Fluent Emoji by Microsoft; package by LobeHub)",
    ),
    Package(
        "@lobehub/fluent-emoji-anim-2",
        "1.0.0",
        "e431da8172e394036c330faa77648d6fbbae1fd3b0be95637c4497c9075019c0",
        "MIT (Fluent Emoji by Microsoft; package by LobeHub)",
    ),
)

STILLS = """
😀 😂 😅 😇 😈 😉 😊 😋 😍 😎 😏 😐 😓 😔 😘 😜 😝 😡 😢 😭 😱 😴 😷 😵 🤓 🤔 🤗 🤢 🤠 🤡 🥳 🥶 🥺 🤖 👻 👽 👾 👿 💀 💩
🙈 🙉 🙊 😺 🎃 👀 👁️ 👂 👃 👄 👅 👍 👎 👋 👏 👊 ✌️ 💪 🙏 👣 🧠 🦷 👶 👸 🎅 🧙 🧜 🧛 💃 🕺
❤️ 🧡 💛 💚 💙 💜 🖤 💔 💕 💘 💝 💯 💢 💥 💦 💧 💤
🐵 🐒 🦍 🐶 🐕 🐩 🐺 🦊 🦝 🐱 🐈 🦁 🐯 🐅 🐴 🐎 🦄 🦓 🦌 🐮 🐄 🐷 🐖 🐽 🐏 🐑 🐐 🐪 🦒 🐘 🦏 🐭 🐀 🐹 🐰 🐇 🐿️ 🦔 🦇 🐻 🐨 🐼 🦘
🐔 🐓 🐣 🐤 🐦 🐧 🕊️ 🦅 🦆 🦉 🦜 🦚 🦩 🐸 🐊 🐢 🦎 🐍 🐲 🐉 🦕 🦖 🐳 🐋 🐬 🐟 🐠 🐡 🦈 🐙 🐚 🦀 🦞 🦐 🦑 🐌 🦋 🐛 🐜 🐝 🐞 🦂 🕷️
💐 🌸 🌹 🌻 🌷 🌱 🌲 🌳 🌴 🌵 🍀 🍁 🍂 🍄
🍇 🍉 🍊 🍋 🍌 🍍 🥭 🍎 🍏 🍐 🍑 🍒 🍓 🥝 🍅 🥥 🥑 🍆 🥔 🥕 🌽 🌶️ 🥦 🍞 🥐 🥨 🧀 🍖 🍔 🍟 🍕 🌭 🌮 🥚 🍳 🍿 🍚 🍜 🍣 🍤 🍦 🍩 🍪 🎂 🍰 🍫 🍬 🍭 🍯 ☕ 🍵 🍷 🍺
🌍 🌋 🏠 🏰 🗼 🗽 ⛲ 🎡 🚂 🚌 🚑 🚒 🚓 🚕 🚗 🚚 🚜 🏍️ 🚲 ⛵ 🚢 ✈️ 🚁 🚀 🛸 ⚓ 🚦 ⌛ ⏰ 🌙 🌝 🌞 ☀️ ⭐ 🌟 🌈 ☁️ 🌧️ 🌩️ ⚡ ❄️ ⛄ 🔥 🌊 ☂️
🎄 🎈 🎉 🎁 🏆 🥇 ⚽ 🏀 🏈 🎾 🎯 🎮 🎲 🧩 🧸 🎨 👓 👕 👗 👑 🎩 💄 💍 💎 🔔 🎵 🎧 🎸 🎹 🎺 🎻 🥁 📱 💻 📷 📺 💡 📕 📚 💰 ✉️ 📦 ✏️ 📌 ✂️ 🔒 🔑 🔨 ⚔️ 🛡️ 🔧 🧲 🔬 🔭 💊 🚪 🛒 🗿 ♻️ ✅ ❌ ❓ ❗ 🔴 🔵
""".split()

ANIMATED = """
😀 😂 😅 😇 😈 😉 😊 😋 😍 😎 😏 😓 😔 😘 😜 👻 👽 👾 💀 💩 👀 👍 👋 👏 💪 🎃 🎅 💃 🕺 💛 💙 💔 💕 💘 🐶 🐱 🐯 🐴 🐮 🐷 🐭 🐰 🐻 🐨 🐼
🐔 🐣 🐤 🐧 🐸 🐢 🐍 🐳 🐬 🐠 🐙 🐌 🐝 🐞 🌈 🌊 🌧️ 🔥 🎂 🍺 🎄 🎉 🎡
""".split()


class Motion(NamedTuple):
    """One rule: its caption words, and position, size, turn and opacity of the emoji at u = 0 … 1 of the clip.

    `place` gives (x, y, size, turns, opacity): x and y in pixels from the centre, size as a share of the frame.
    """

    name: str
    en: str
    zh: str
    place: object


MOTIONS = (
    Motion("left", "moving left", "向左移动", lambda u: (4.5 - 9 * u, 0, 0.72, 0, 1)),
    Motion("right", "moving right", "向右移动", lambda u: (9 * u - 4.5, 0, 0.72, 0, 1)),
    Motion("up", "moving up", "向上移动", lambda u: (0, 4.5 - 9 * u, 0.72, 0, 1)),
    Motion("bounce", "bouncing", "弹跳", lambda u: (0, 4.5 - 9 * abs(math.sin(2 * math.pi * u)), 0.72, 0, 1)),
    Motion("spin", "spinning", "旋转", lambda u: (0, 0, 0.8, u, 1)),
    Motion("zoom", "zooming in", "放大", lambda u: (0, 0, 0.35 + 0.65 * u, 0, 1)),
    Motion("blink", "blinking", "闪烁", lambda u: (0, 0, 0.9, 0, 0.575 + 0.425 * math.cos(4 * math.pi * u))),
)
DRAWN = {"en": "animated", "zh": "动画"}  # the caption word of the clips that people drew


class Clip(NamedTuple):
    """One clip of the data set: its emoji, and its motion's name, "animated" for one that was drawn."""

    record: EmojiRecord
    motion: str


def caption(clip: Clip, language: str, form: int = 0) -> str:
    """ "cat face, spinning" and "spinning cat face"; "猫脸，旋转" and "旋转的猫脸"."""
    words = {m.name: getattr(m, language) for m in MOTIONS} | {"animated": DRAWN[language]}
    label, word = getattr(clip.record, f"label_{language}"), words[clip.motion]
    if form == 0:
        return f"{label}, {word}" if language == "en" else f"{label}，{word}"
    return f"{word} {label}" if language == "en" else f"{word}的{label}"


# --- rendering -----------------------------------------------------------------------------------------------------------


def render(pictures: Tensor, motion: Motion, frames: int = FRAMES, size: int = SIZE) -> Tensor:
    """Stills (N, 3, 64, 64) in −1…1, on white, moved by a rule → clips (N, 3, frames, size, size).

    The picture is halved first (each pixel the mean of four), then placed by bilinear sampling; outside it is white.
    """
    small = 1 - F.interpolate(
        pictures, size=(size, size), mode="area"
    )  # 0 is white, so the border may be padded by zero
    moved = []
    for frame in range(frames):
        x, y, scale, turns, opacity = motion.place(frame / (frames - 1))
        cos, sin = (f(2 * math.pi * turns) / scale for f in (math.cos, math.sin))
        dx, dy = 2 * x / size, 2 * y / size
        theta = torch.tensor([[cos, sin, -cos * dx - sin * dy], [-sin, cos, sin * dx - cos * dy]])
        grid = F.affine_grid(theta.expand(len(small), 2, 3), list(small.shape), align_corners=False)
        moved.append(opacity * F.grid_sample(small, grid, align_corners=False))
    return 1 - torch.stack(moved, dim=2)


def to_bytes(clips: Tensor) -> Tensor:
    """−1…1 → uint8, as the data set is kept in memory."""
    return ((clips.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


# --- reading -------------------------------------------------------------------------------------------------------------


def load_animated(folder: Path | str = ASSETS) -> tuple[np.ndarray, list[str]]:
    """The drawn clips, uint8 (N, 17, 32, 32, 3), and their hexcodes.

    Raises FileNotFoundError where a file is missing, ValueError where sheet and list do not belong together.
    """
    folder = Path(folder)
    for name in (SHEET, LIST):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"no clip data: {folder / name} is missing; {REBUILD}")
    listed = json.loads((folder / LIST).read_text(encoding="utf-8"))
    with Image.open(folder / SHEET) as picture:
        sheet = np.asarray(picture.convert("RGB"))  # (N·32, 17·32, 3)
    clips = sheet.reshape(-1, SIZE, FRAMES, SIZE, 3).swapaxes(1, 2).copy()
    if pixels_sha256(clips) != listed["pixels_sha256"] or len(clips) != len(listed["hexcodes"]):
        raise ValueError(f"{folder / SHEET} does not hold the clips that {LIST} describes; {REBUILD}")
    return clips, listed["hexcodes"]


@cache
def clip_data() -> tuple[Tensor, list[Clip]]:
    """All clips, uint8 (N, 3, 17, 32, 32): the procedural ones motion by motion, then the drawn ones; and what they are."""
    images, records = load_emoji()
    by_key = {join_key(record.hexcode): index for index, record in enumerate(records)}
    chosen = [by_key[key_of(emoji)] for emoji in STILLS]
    pictures = torch.from_numpy(images[chosen]).permute(0, 3, 1, 2).float() / 127.5 - 1
    clips, told = [], []
    for motion in MOTIONS:
        clips.append(to_bytes(render(pictures, motion)))
        told += [Clip(records[index], motion.name) for index in chosen]
    drawn, hexcodes = load_animated()
    clips.append(torch.from_numpy(drawn).permute(0, 4, 1, 2, 3))
    told += [Clip(records[by_key[join_key(hexcode)]], "animated") for hexcode in hexcodes]
    return torch.cat(clips).contiguous(), told


def clips_of(emoji: list[str], motions: list[str]) -> Tensor:
    """A few procedural clips, emoji-major: uint8 (N, 3, 17, 32, 32)."""
    images, records = load_emoji()
    by_key = {join_key(record.hexcode): index for index, record in enumerate(records)}
    pictures = torch.from_numpy(images[[by_key[key_of(e)] for e in emoji]]).permute(0, 3, 1, 2).float() / 127.5 - 1
    rules = {motion.name: motion for motion in MOTIONS}
    clips = [to_bytes(render(pictures, rules[name])) for name in motions]
    return torch.stack(clips, dim=1).flatten(0, 1)


def as_floats(clips: Tensor) -> Tensor:
    """uint8 → −1…1."""
    return clips.float() / 127.5 - 1


# --- building ------------------------------------------------------------------------------------------------------------


def key_of(emoji: str) -> str:
    """The join key of an emoji character."""
    return join_key("-".join(f"{ord(character):x}" for character in emoji))


def seventeen(data: bytes) -> np.ndarray:
    """17 evenly spaced frames of an animation, over white, at 32×32 (each pixel a mean): uint8 (17, 32, 32, 3)."""
    found = []
    with Image.open(io.BytesIO(data)) as animation:
        for frame in range(FRAMES):
            animation.seek(frame * animation.n_frames // FRAMES)
            white = over_white(np.asarray(animation.convert("RGBA")))
            found.append(np.asarray(Image.fromarray(white).resize((SIZE, SIZE), Image.Resampling.BOX)))
    return np.stack(found)


def collect(tarballs: list[Path]) -> tuple[np.ndarray, list[str]]:
    """The clips of `ANIMATED`, in that order: uint8 (N, 17, 32, 32, 3), and their hexcodes."""
    wanted, found = [key_of(emoji) for emoji in ANIMATED], {}
    for tarball in tarballs:
        with tarfile.open(tarball, "r|gz") as archive:
            for member in tqdm(archive, desc=tarball.name, unit="file"):
                path = Path(member.name)
                if path.suffix == ".webp" and join_key(path.stem) in wanted:
                    found[join_key(path.stem)] = seventeen(archive.extractfile(member).read())
    if missing := [key for key in wanted if key not in found]:
        raise ValueError(f"the packages lack {', '.join(missing)}")
    return np.stack([found[key] for key in wanted]), wanted


def write_clips(clips: np.ndarray, hexcodes: list[str], folder: Path) -> None:
    """The sheet and its list."""
    sheet = clips.swapaxes(1, 2).reshape(-1, FRAMES * SIZE, 3)
    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, "webp", lossless=True, quality=75, method=6)
    sources = [{"package": f"npm {p.name}@{p.version}", "sha256": p.sha256, "licence": p.licence} for p in PACKAGES]
    listed = {"sources": sources, "pixels_sha256": pixels_sha256(clips), "hexcodes": hexcodes}
    write_atomic(folder / SHEET, buffer.getvalue())
    write_atomic(folder / LIST, (json.dumps(listed, indent=1) + "\n").encode())


def main(
    output: Annotated[Path, typer.Option(help="where the two files go")] = ASSETS,
    cache_folder: Annotated[Path, typer.Option(help="where the npm tarballs are kept, outside the repository")] = CACHE,
) -> None:
    """Build the drawn clips from two npm packages (347 MB, fetched once into the cache)."""
    clips, hexcodes = collect([fetch_package(package, cache_folder) for package in PACKAGES])
    write_clips(clips, hexcodes, output)
    typer.echo(f"{len(clips)} drawn clips; {len(STILLS)} stills × {len(MOTIONS)} motions are rendered when needed")
    for name in (SHEET, LIST):
        typer.echo(f"{output / name}: {(output / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    typer.run(main)
