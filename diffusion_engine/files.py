"""Files: whole ones or none, pictures and clips with a record of what made them, the header of a safetensors file.

Nothing here imports torch, so that a damaged file is named at once.
"""

import hashlib
import io
import json
import os
import re
import secrets
from dataclasses import fields
from pathlib import Path

from diffusion_engine.request import Request, one_of, whole_number

CLIP_SUFFIXES = (".gif", ".webp", ".mp4")
CLIP_MILLISECONDS = 80  # a frame stays
DESCRIPTION = 0x010E  # EXIF tag
RECORD = "diffusion_engine"  # the PNG's text chunk


# Writing: whole files or none


def check_output(path: str | Path, suffix: str | tuple[str, ...]) -> Path:
    """Say before any work whether ``path`` can be written; ``suffix`` is the one it must have, or several to choose from.

    Raises:
        ValueError: another suffix, a folder that is missing or read-only, a folder in the file's place.
    """
    path, known = Path(path), (suffix,) if isinstance(suffix, str) else suffix
    if not path.name or path.is_dir():
        name = "picture" if isinstance(suffix, str) else "clip"
        raise ValueError(f"output {path} is a folder; try {path / (name + known[0])}")
    if path.suffix.lower() not in known:
        near = " or ".join(path.with_suffix(end).name for end in known)
        raise ValueError(f"output {path} has the suffix {path.suffix or '(none)'}; try {near}")
    if not path.parent.is_dir():
        raise ValueError(f"output folder {path.parent} does not exist; create it first: mkdir -p {path.parent}")
    probe = _temporary(path)
    try:
        probe.open("xb").close()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"output folder {path.parent} cannot be written ({error.strerror}); try another") from None
    return path


def write_files(contents: dict[Path, bytes]) -> None:
    """Write all files or none that is partial: each is written beside its place and then moved into it."""
    pending = {}
    try:
        for path, data in contents.items():
            pending[path] = temporary = _temporary(path)
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in pending.items():
            temporary.replace(path)
    finally:
        for temporary in pending.values():
            temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")  # threads may write the same file


# Pictures with a record


def png(image) -> bytes:
    """A PIL picture as PNG; the record that the engine left in ``image.info`` becomes its text chunk (iTXt, UTF-8)."""
    from PIL.PngImagePlugin import PngInfo

    chunks, buffer = PngInfo(), io.BytesIO()
    if RECORD in image.info:
        chunks.add_itxt(RECORD, image.info[RECORD])
    image.save(buffer, format="png", pnginfo=chunks)
    return buffer.getvalue()


def gif(frames: list, milliseconds: int = 80, hold: int = 1_500) -> bytes:
    """PIL pictures as an endless GIF whose last frame stays for ``hold`` milliseconds."""
    buffer = io.BytesIO()
    durations = [milliseconds] * (len(frames) - 1) + [hold]
    frames[0].save(buffer, format="gif", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    return buffer.getvalue()


def animation(frames: list, suffix: str, milliseconds: int = CLIP_MILLISECONDS, scale: int = 1) -> bytes:
    """PIL pictures as one file that plays; the record in the first one's ``info`` travels along.

    Args:
        suffix: ``.gif`` (256 colours a frame; the record is its comment), ``.webp`` (lossless; EXIF description) or
            ``.mp4`` (H.264, lossy, through imageio; the container's comment).
        milliseconds: how long a frame stays. scale: small pictures are magnified by this whole number.

    Raises:
        ValueError: another suffix.
    """
    from PIL import Image

    one_of("suffix", suffix, CLIP_SUFFIXES)
    text, buffer = frames[0].info.get(RECORD, ""), io.BytesIO()
    size = frames[0].width * scale, frames[0].height * scale
    large = [frame.resize(size, Image.Resampling.NEAREST) for frame in frames]
    if suffix == ".mp4":
        return _mp4(large, milliseconds, text)
    several = {"save_all": True, "append_images": large[1:], "duration": milliseconds, "loop": 0}
    if suffix == ".gif":
        large[0].save(buffer, format="gif", **several, comment=text.encode())
    else:
        exif = Image.Exif()
        exif[DESCRIPTION] = json.dumps(text)[1:-1]  # EXIF holds ASCII only
        large[0].save(buffer, format="webp", lossless=True, **several, exif=exif)
    return buffer.getvalue()


def _mp4(frames: list, milliseconds: int, text: str) -> bytes:
    """Frames as H.264; ffmpeg writes files only, so by way of one."""
    import tempfile

    import imageio.v2 as imageio
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        settings = {"codec": "libx264", "quality": 9, "macro_block_size": 2, "ffmpeg_log_level": "error"}
        extra = ["-metadata", f"comment={json.dumps(text)[1:-1]}", "-fflags", "+bitexact", "-threads", "1"]
        with imageio.get_writer(path, fps=1000 / milliseconds, output_params=extra, **settings) as writer:
            for frame in frames:
                writer.append_data(np.asarray(frame))
        return path.read_bytes()


def save_clip(frames: list, path: str | Path, scale: int = 4) -> Path:
    """Write one of a result's clips (.gif, .webp or .mp4) with the record of what made it; whole or not at all.

    Raises:
        ValueError: see `check_output`.
    """
    path = check_output(path, CLIP_SUFFIXES)
    write_files({path: animation(frames, path.suffix.lower(), scale=scale)})
    return path


def save_picture(image, path: str | Path) -> Path:
    """Write one of a result's pictures as a PNG that tells what made it; whole or not at all.

    Raises:
        ValueError: see `check_output`.
    """
    path = check_output(path, ".png")
    write_files({path: png(image)})
    return path


def read_record(path: str | Path) -> dict:
    """What made a picture, as the engine wrote it into the PNG.

    Raises:
        ValueError: no such file, not a PNG, no record, or a damaged one.
    """
    from PIL import Image

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file; give a PNG that diffusion-engine wrote")
    try:
        with Image.open(path) as image:
            text, kind = image.info.get(RECORD), image.format
            image.load()
    except (OSError, SyntaxError, ValueError):
        raise ValueError(f"{path} is not a whole picture; give a PNG that diffusion-engine wrote") from None
    if kind != "PNG" or text is None:
        raise ValueError(f"{path} ({kind}) has no record of what made it; give a PNG that diffusion-engine wrote")
    return _checked_record(path, text)


def read_clip_record(path: str | Path) -> dict:
    """What made a clip, as the engine wrote it into the GIF, WebP or MP4.

    Raises:
        ValueError: no such file, another kind of file, no record, or a damaged one.
    """
    from PIL import Image

    path = Path(path)
    give = "give a .gif, .webp or .mp4 that diffusion-engine animate wrote"
    if not path.is_file():
        raise ValueError(f"{path} is not a file; {give}")
    try:
        if path.suffix.lower() == ".mp4":
            text = json.loads(f'"{_mp4_comment(path)}"')
        else:
            with Image.open(path) as image:
                comment, exif = image.info.get("comment", b""), image.getexif().get(DESCRIPTION, "")
            text = comment.decode() if comment else json.loads(f'"{exif}"')
    except (OSError, SyntaxError, ValueError, RuntimeError):
        raise ValueError(f"{path} is not a clip; {give}") from None
    if not text:
        raise ValueError(f"{path} has no record of what made it; {give}")
    return _checked_record(path, text)


def _mp4_comment(path: Path) -> str:
    """The container's comment, as ffmpeg reads it; newlines and ``=;#\\`` come escaped there."""
    import subprocess

    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), "-f", "ffmetadata", "-"]
    found = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False).stdout
    line = next((line for line in found.splitlines() if line.startswith("comment=")), "comment=")
    return re.sub(r"\\([=;#\\])", r"\1", line.removeprefix("comment="))


def _checked_record(path: Path, text: str) -> dict:
    """The record in a file's text, whole and usable."""
    try:
        record = json.loads(text)
        record["index"] = whole_number("index", record["index"], 0, len(request_of(record).seeds) - 1)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} has a damaged record ({error})") from None
    return record


def request_of(record: dict) -> Request:
    """The request in a picture's record."""
    known = {f.name for f in fields(Request)}
    return Request(**{name: value for name, value in record["request"].items() if name in known})


# Reading weights without loading them


def sha256(data: bytes) -> str:
    """Hash of a file's bytes, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def read_header(path: Path) -> dict[str, dict]:
    """Names, types and shapes in a safetensors file, and the proof that the file is whole.

    The format: 8 bytes n, little-endian; n bytes of JSON; then the tensors. Nothing of it is ever executed.

    Raises:
        ValueError: missing, a pickle, truncated, or something else.
    """
    if not path.is_file():
        others = [
            p.name for p in path.parent.glob(f"{path.stem}.*") if p.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl")
        ]
        also = f"; {others[0]} is a pickle and is never opened" if others else ""
        raise ValueError(f"model file {path} is missing{also}; restore it, or give another model folder")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if length > size and (start[:4] == b"PK\x03\x04" or start[:1] == b"\x80" and start[1:2] in b"\2\3\4\5"):
            raise ValueError(
                f"model file {path} is a pickle, which can run code when opened; convert it to safetensors"
            )
        if size < 8 or length > 100_000_000:
            raise ValueError(f"model file {path} is not a safetensors file ({size} bytes); restore it")
        header = file.read(length)
    if len(header) < length:
        raise ValueError(
            f"model file {path} is truncated: {size} bytes, its header alone needs {8 + length}; restore it"
        )
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        expected = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        tensors = {n: {"dtype": str(e["dtype"]), "shape": tuple(map(int, e["shape"]))} for n, e in entries.items()}
    except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError):
        raise ValueError(f"model file {path} is not a safetensors file: its header is unreadable; restore it") from None
    if size < expected:
        raise ValueError(f"model file {path} is truncated: {size} of {expected} bytes; restore it")
    if size > expected:
        raise ValueError(f"model file {path} is damaged: {size} bytes where {expected} belong; restore it")
    return tensors
