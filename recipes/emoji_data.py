"""The emoji data set: 1,911 pictures (64×64 RGB on white), each with an English and a Chinese caption.

    python -m recipes.emoji_data        # builds diffusion_engine/assets/emoji/ from two npm packages

It writes two files, the same bytes every time under the pinned Pillow:

* ``images.webp``: one lossless contact sheet, 49 pictures a row, 39 rows, in the order of the records;
* ``captions.json``: the records (see `EmojiRecord`), the sources, and the SHA-256 of the pixels, which ties it to its sheet.

Sources and licences (this notice travels with the data):

* pictures: Noto Emoji by Google, Apache License 2.0, taken from npm ``emoji-datasource-google@16.0.0``;
* captions: npm ``emojibase-data@17.0.0``, MIT License, Copyright (c) 2017-2019 Miles Johnson; their text comes from the
  Unicode Common Locale Data Repository (CLDR), Unicode License, Copyright Unicode, Inc.

An emoji is kept when it has a Noto picture and both captions. The join key is the hexcode in lower case without ``fe0f``.
Skin-tone variants are left out; the five plain skin-tone swatches stay. Some pictures are equal pixel for pixel (the flags
of Norway and Svalbard), and a retrieval score should count any of them as right: `EmojiRecord.same_as`. One of
these is a slip of the package itself: its picture of Sark is the flag of Saudi Arabia.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from PIL import Image
from tqdm import tqdm

SIZE = 64
COUNT = 1911
COLUMNS = 49  # 49 × 39 = 1,911: the sheet has no empty cell

ASSETS = Path(__file__).resolve().parents[1] / "diffusion_engine" / "assets" / "emoji"
CACHE = Path.home() / ".cache" / "diffusion_engine" / "data" / "npm"
IMAGES, CAPTIONS = "images.webp", "captions.json"

REBUILD = "build it with: python -m recipes.emoji_data"


class Package(NamedTuple):
    """An npm package, pinned by version and by the SHA-256 of its tarball."""

    name: str
    version: str
    sha256: str
    licence: str

    @property
    def tarball(self) -> str:
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"  # as npm pack names it


PICTURES_PACKAGE = Package(
    "emoji-datasource-google",
    "16.0.0",
    "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
    "Apache-2.0 (Noto Emoji by Google)",
)
CAPTIONS_PACKAGE = Package(
    "emojibase-data",
    "17.0.0",
    "d01d0e2ca4e22cb402679532155342c71e2e871f25c32223c013b8b166ebdf5a",
    "MIT (emojibase, Miles Johnson); text from Unicode CLDR, Unicode License",
)


@dataclass(frozen=True)
class EmojiRecord:
    """What is known about one picture.

    `kind` is "flag" (group "flags", the pirate flag included), "clock" (the 24 clock faces) or "other": the first two are
    told apart by a few pixels, so scores report them separately. `same_as` is the index of the first picture with
    exactly these pixels, the record's own index where there is no earlier one: two pictures are equal if and only if
    their `same_as` are.
    """

    hexcode: str
    emoji: str
    order: int
    group: str
    kind: str
    label_en: str
    label_zh: str
    tags_en: list[str]
    tags_zh: list[str]
    same_as: int


class EmojiData(NamedTuple):
    """The pictures, uint8 of shape (N, 64, 64, 3), and their N records in the same order."""

    images: np.ndarray
    records: list[EmojiRecord]


# --- reading -------------------------------------------------------------------------------------------------------------


def load_emoji(folder: Path | str = ASSETS) -> EmojiData:
    """The data set in `folder`: images (N, 64, 64, 3) uint8, and N records in the order of emojibase.

    Raises FileNotFoundError where a file is missing, ValueError where sheet and captions do not belong together.
    """
    folder = Path(folder)
    for name in (IMAGES, CAPTIONS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"no emoji data: {folder / name} is missing; {REBUILD}")
    captions = json.loads((folder / CAPTIONS).read_text(encoding="utf-8"))
    records = [EmojiRecord(**record) for record in captions["records"]]
    images = split_sheet((folder / IMAGES).read_bytes(), len(records))
    if pixels_sha256(images) != captions["pixels_sha256"]:
        raise ValueError(f"{folder / IMAGES} does not hold the pictures that {CAPTIONS} describes; {REBUILD}")
    return EmojiData(images, records)


def split_sheet(data: bytes, count: int) -> np.ndarray:
    """The first `count` cells of an encoded contact sheet, row by row: uint8 (count, 64, 64, 3)."""
    with Image.open(io.BytesIO(data)) as picture:
        sheet = np.asarray(picture.convert("RGB"))  # (rows·64, columns·64, 3)
    rows, columns = sheet.shape[0] // SIZE, sheet.shape[1] // SIZE
    if sheet.shape[:2] != (rows * SIZE, columns * SIZE) or rows * columns < count:
        raise ValueError(
            f"a sheet of {sheet.shape[1]}×{sheet.shape[0]} pixels cannot hold {count} pictures of {SIZE}×{SIZE}"
        )
    cells = sheet.reshape(rows, SIZE, columns, SIZE, 3).swapaxes(1, 2)  # (rows, columns, 64, 64, 3)
    return cells.reshape(-1, SIZE, SIZE, 3)[:count].copy()


def pixels_sha256(images: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(images).tobytes()).hexdigest()


# --- building ------------------------------------------------------------------------------------------------------------


def join_key(hexcode: str) -> str:
    """The name under which both packages know an emoji: `2764-FE0F` → `2764`."""
    return "-".join(part for part in hexcode.lower().split("-") if part != "fe0f")


def over_white(rgba: np.ndarray) -> np.ndarray:
    """Composite straight-alpha RGBA over white, in integers: round((α·c + (255 − α)·255) / 255), uint8 (…, 3)."""
    colour, alpha = rgba[..., :3].astype(np.int32), rgba[..., 3:].astype(np.int32)
    return ((alpha * colour + (255 - alpha) * 255 + 127) // 255).astype(np.uint8)


def first_equal(images: np.ndarray) -> list[int]:
    """For each picture, the index of the first picture with exactly the same pixels."""
    first: dict[bytes, int] = {}
    return [first.setdefault(image.tobytes(), index) for index, image in enumerate(images)]


def kind_of(hexcode: str, group: str) -> str:
    """ "flag", "clock" (U+1F550 … U+1F567, the clock faces) or "other"."""
    if group == "flags":
        return "flag"
    return "clock" if 0x1F550 <= int(hexcode.split("-")[0], 16) <= 0x1F567 else "other"


def fetch_package(package: Package, cache: Path) -> Path:
    """The package's tarball in `cache`, fetched with `npm pack` where it is not there yet, its SHA-256 verified."""
    target = cache / package.tarball
    if not target.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            command = ["npm", "pack", "--silent", "--pack-destination", scratch, f"{package.name}@{package.version}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            os.replace(Path(scratch) / package.tarball, target)
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise ValueError(f"{target} has SHA-256 {found}, expected {package.sha256}; delete it and run again")
    return target


def read_captions(tarball: Path) -> list[dict[str, Any]]:
    """Every emoji of emojibase with both labels, in emojibase's `order`; skin-tone variants are nested there, hence absent."""
    with tarfile.open(tarball) as archive:

        def member(name: str) -> Any:
            return json.load(archive.extractfile(f"package/{name}"))

        english, chinese, messages = member("en/data.json"), member("zh/data.json"), member("en/messages.json")
    groups = {group["order"]: group["key"] for group in messages["groups"]}
    by_hexcode = {entry["hexcode"]: entry for entry in chinese}
    captions = []
    for entry in english:
        twin = by_hexcode.get(entry["hexcode"])
        if "group" not in entry or not entry.get("label") or twin is None or not twin.get("label"):
            continue  # the lone regional indicators have no group
        group = groups[entry["group"]]
        captions.append(
            {
                "hexcode": entry["hexcode"],
                "emoji": entry["emoji"],
                "order": entry["order"],
                "group": group,
                "kind": kind_of(entry["hexcode"], group),
                "label_en": entry["label"],
                "label_zh": twin["label"],
                "tags_en": entry.get("tags", []),
                "tags_zh": twin.get("tags", []),
            }
        )
    return sorted(captions, key=lambda caption: caption["order"])


def read_pictures(tarball: Path, wanted: set[str]) -> dict[str, np.ndarray]:
    """The 64×64 pictures whose join key is `wanted`, over white: {join key: uint8 (64, 64, 3)}."""
    pictures: dict[str, np.ndarray] = {}
    with (
        tarfile.open(tarball, "r|gz") as archive,
        tqdm(total=len(wanted), desc="reading pictures", unit="picture") as bar,
    ):
        for member in archive:
            path = Path(member.name)
            key = join_key(path.stem)
            if path.parent.as_posix() != "package/img/google/64" or key not in wanted:
                continue
            with Image.open(archive.extractfile(member)) as picture:
                rgba = np.asarray(picture.convert("RGBA"))
            if rgba.shape != (SIZE, SIZE, 4) or key in pictures:
                raise ValueError(f"{member.name}: expected one {SIZE}×{SIZE} picture per emoji, got shape {rgba.shape}")
            pictures[key] = over_white(rgba)
            bar.update()
        bar.total = len(pictures)  # what is left has no Noto picture
    return pictures


def collect(pictures_tarball: Path, captions_tarball: Path) -> EmojiData:
    """Join the two packages: every emoji that has a picture and both captions, in emojibase's order."""
    captions = read_captions(captions_tarball)
    pictures = read_pictures(pictures_tarball, {join_key(caption["hexcode"]) for caption in captions})
    captions = [caption for caption in captions if join_key(caption["hexcode"]) in pictures]
    if len(captions) != COUNT:
        raise ValueError(f"expected {COUNT} emoji with a picture and both captions, found {len(captions)}")
    images = np.stack([pictures[join_key(caption["hexcode"])] for caption in captions])
    same_as = first_equal(images)
    return EmojiData(images, [EmojiRecord(**caption, same_as=first) for caption, first in zip(captions, same_as)])


def encode_sheet(images: np.ndarray, columns: int = COLUMNS) -> bytes:
    """Pictures (N, 64, 64, 3) as one lossless WebP contact sheet, row by row; spare cells are white."""
    rows = -(-len(images) // columns)
    cells = np.full((rows * columns, SIZE, SIZE, 3), 255, np.uint8)
    cells[: len(images)] = images
    sheet = cells.reshape(rows, columns, SIZE, SIZE, 3).swapaxes(1, 2).reshape(rows * SIZE, columns * SIZE, 3)
    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, "webp", lossless=True, quality=75, method=6)
    return buffer.getvalue()


def encode_captions(data: EmojiData) -> bytes:
    """The records as JSON, one a line, with the sources and the hash of the pixels."""
    sources = [
        {"package": f"npm {p.name}@{p.version}", "sha256": p.sha256, "licence": p.licence}
        for p in (PICTURES_PACKAGE, CAPTIONS_PACKAGE)
    ]
    lines = ",\n".join(json.dumps(asdict(record), ensure_ascii=False) for record in data.records)
    head = f'"sources": {json.dumps(sources)},\n"pixels_sha256": "{pixels_sha256(data.images)}"'
    return f'{{\n{head},\n"records": [\n{lines}\n]\n}}\n'.encode()


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside `path`, then rename, so that nobody ever sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_bytes(data)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_emoji(data: EmojiData, folder: Path) -> None:
    """Both files; each appears whole, and the hash in the captions exposes a pair that an interruption left unmatched."""
    write_atomic(folder / IMAGES, encode_sheet(data.images))
    write_atomic(folder / CAPTIONS, encode_captions(data))


def main(
    output: Annotated[Path, typer.Option(help="where the two files go")] = ASSETS,
    cache: Annotated[Path, typer.Option(help="where the npm tarballs are kept, outside the repository")] = CACHE,
) -> None:
    """Build the emoji data set from two npm packages (fetched once into the cache)."""
    tarballs = [fetch_package(package, cache) for package in (PICTURES_PACKAGE, CAPTIONS_PACKAGE)]
    data = collect(*tarballs)
    write_emoji(data, output)
    kinds = {kind: sum(record.kind == kind for record in data.records) for kind in ("flag", "clock", "other")}
    distinct = len({record.same_as for record in data.records})
    typer.echo(f"{len(data.records)} pictures, {distinct} of them distinct; {kinds}")
    for name in (IMAGES, CAPTIONS):
        typer.echo(f"{output / name}: {(output / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    typer.run(main)
