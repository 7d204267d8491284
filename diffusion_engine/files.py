"""Files and what is written in them: requests, pictures with a record of what made them, the model folder.

Nothing here imports torch before weights are loaded, so that a wrong argument or a damaged file is named at once.
"""

import difflib
import hashlib
import io
import json
import math
import operator
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

SHIPPED_MODEL = Path(__file__).parent / "assets" / "model"
FORMAT = "diffusion-engine text-to-image 1"
WEIGHTS = {"dit": "dit.safetensors", "vae": "vae.safetensors", "text_encoder": "text_encoder.safetensors"}
TOKENIZER = "tokenizer.json"
SHIPPED_CLIP_MODEL = Path(__file__).parent / "assets" / "clip_model"
CLIP_FORMAT = "diffusion-engine text-to-clip 1"
CLIP_WEIGHTS = {"dit": "dit.safetensors", "vae": "vae.safetensors", "refiner": "refiner.safetensors"}
CLIP_SIZES = (32, 64)
CLIP_SUFFIXES = (".gif", ".webp", ".mp4")
CLIP_MILLISECONDS = 80  # a frame stays
DESCRIPTION = 0x010E  # EXIF tag
SIZES = (32, 128)  # pixels a side that are accepted when config.json does not say
RECORD = "diffusion_engine"  # the PNG's text chunk
SOLVERS = ("euler", "heun", "multistep")
DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("float32", "bfloat16", "float16")
MAX_STEPS = 1_000
MAX_FRAMES = 257
MAX_COUNT = 1_000
MAX_SEED = 2**64 - 1


# What a picture is made from


@dataclass(frozen=True)
class Switches:
    """How the arithmetic of a run is done. As it stands, all that is exact and never slower is on, all else off.

    Exact up to rounding:
        batched_cfg: both sides of guidance in one forward. attention_chunk: queries handled at a time.
        vae_batch: pictures decoded at a time. vae_tile, vae_overlap: in tiles of this many latents a side. latent_buffer: latents allocated once.
        prompt_cache: keep prompt embeddings. hoist: work out once what no latent changes. compile: `torch.compile` the blocks.

    Another picture:
        step_cache: threshold of the first-block cache; 0 reuses nothing. guidance_interval: guide where low < σ ≤ high only.
        guidance_rescale: 0 … 1. cfg_zero_star: CFG-Zero*'s projection. zero_steps: first steps that stand still.

    Raises:
        ValueError: a value outside its range; the message names the value, the rule and the nearest valid value.
    """

    batched_cfg: bool = True
    attention_chunk: int | None = None
    vae_batch: int | None = None
    vae_tile: int | None = None
    vae_overlap: int = 8
    latent_buffer: bool = False
    prompt_cache: bool = True
    hoist: bool = False
    compile: bool = False
    step_cache: float | None = None
    guidance_interval: tuple[float, float] | None = None
    guidance_rescale: float = 0.0
    cfg_zero_star: bool = False
    zero_steps: int = 0

    def __post_init__(self):
        for field in fields(self):
            value, label = getattr(self, field.name), field.name.replace("_", " ")
            if field.type is bool:
                checked = yes_or_no(label, value)
            elif value is None and field.default is None:
                checked = None
            else:
                checked = _SWITCH_RULES[field.name](label, value)
            object.__setattr__(self, field.name, checked)  # the class is frozen; here it takes the checked form
        if self.vae_tile is not None and self.vae_overlap >= self.vae_tile:
            rule = f"vae overlap {self.vae_overlap} must be below vae tile {self.vae_tile}"
            raise ValueError(f"{rule}; try overlap {self.vae_tile // 4}, or tile {self.vae_overlap + 1} or more")

    @classmethod
    def of(cls, given: dict, base: "Switches | None" = None) -> "Switches":
        """``base`` (the defaults) with the switches that were given by name.

        Raises:
            ValueError: an unknown name; see also the class.
        """
        known = tuple(field.name for field in fields(cls))
        for name in given:
            one_of("switch", name, known)
        return replace(base or cls(), **given)

    @property
    def changed(self) -> dict:
        """Name → value of every switch that is not as it stands by default."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


@dataclass(frozen=True)
class Request:
    """Everything that decides a batch of pictures, given a model: what goes into a picture's record, and what `resume` needs.

    Args:
        prompts: one or more; ``num_images_per_prompt`` pictures each, prompt 0's first.
        negative_prompts: one a prompt, or empty for none.
        num_inference_steps: 1 … 1,000. guidance_scale: w ≥ 0. seed: 0 … 2**64 − 1; picture i uses seed + i.
        height, width: pixels. solver: ``euler``, ``heun`` or ``multistep``. shift: of the schedule, > 0.
        given_latents: the first latents were handed in, so the seeds alone do not tell the picture.
        switches: how it is computed: a `Switches`, its fields by name, or None for the defaults.
        frames: of a clip; 1 is a picture.

    Raises:
        ValueError: a value outside its range; the message names the value, the rule and the nearest valid value.
    """

    prompts: tuple[str, ...]
    negative_prompts: tuple[str, ...] = ()
    num_inference_steps: int = 28
    guidance_scale: float = 4.0
    seed: int = 0
    num_images_per_prompt: int = 1
    height: int = 64
    width: int = 64
    solver: str = "euler"
    shift: float = 1.0
    given_latents: bool = False
    switches: Switches | None = None
    frames: int = 1

    def __post_init__(self):
        prompts, negatives = texts("prompt", self.prompts), texts("negative prompt", self.negative_prompts)
        if not prompts:
            raise ValueError("there is no prompt; give at least one, such as 'red apple'")
        if negatives and len(negatives) != len(prompts):
            counts = f"{len(negatives)} negative prompts for {len(prompts)} prompts"
            raise ValueError(f"{counts}; give one text for all, or one each")
        count = whole_number("count", self.num_images_per_prompt, 1, MAX_COUNT)
        checked = {
            "prompts": prompts,
            "negative_prompts": negatives,
            "num_inference_steps": whole_number("steps", self.num_inference_steps, 1, MAX_STEPS),
            "guidance_scale": real_number("guidance", self.guidance_scale, near=4),
            "seed": check_seed(self.seed, len(prompts) * count),
            "num_images_per_prompt": count,
            "height": whole_number("height", self.height, 1, 2**20),
            "width": whole_number("width", self.width, 1, 2**20),
            "solver": one_of("solver", self.solver, SOLVERS),
            "shift": real_number("shift", self.shift),
            "switches": self.switches if isinstance(self.switches, Switches) else Switches.of(self.switches or {}),
            "frames": whole_number("frames", self.frames, 1, MAX_FRAMES),
        }
        if checked["shift"] == 0:
            raise ValueError("shift 0 maps every noise level to 0; try 1")
        if (zero := checked["switches"].zero_steps) >= checked["num_inference_steps"]:
            steps = checked["num_inference_steps"]
            raise ValueError(f"zero steps {zero} of {steps} leave nothing to draw with; try {min(1, steps - 1)}")
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # the class is frozen; here it takes the checked form

    @property
    def every_prompt(self) -> list[str]:
        """One a picture, prompt-major."""
        return [prompt for prompt in self.prompts for _ in range(self.num_images_per_prompt)]

    @property
    def every_negative(self) -> list[str]:
        """One a picture; the empty prompt where none was given."""
        negatives = self.negative_prompts or ("",) * len(self.prompts)
        return [negative for negative in negatives for _ in range(self.num_images_per_prompt)]

    @property
    def seeds(self) -> tuple[int, ...]:
        """One a picture, prompt-major."""
        return tuple(self.seed + i for i in range(len(self.prompts) * self.num_images_per_prompt))


def recommended(config: dict) -> dict:
    """The settings that a model's configuration recommends: ``guidance_scale``, ``shift``, ``height``, ``width``."""
    usual = {"guidance_scale": 4.0, "shift": 1.0, "num_inference_steps": 28, "height": 64, "width": 64, "frames": 1}
    return usual | config.get("recommended", {})


def make_request(
    config: dict,
    prompt,
    negative_prompt=None,
    num_inference_steps=28,
    guidance_scale=None,
    seed=0,
    num_images_per_prompt=1,
    height=None,
    width=None,
    solver="euler",
    shift=None,
    given_latents: bool = False,
    switches: Switches | None = None,
    frames=None,
) -> Request:
    """A checked request for one model: what is None becomes what the model's ``config`` recommends.

    Args:
        prompt: one text or several. negative_prompt: None, one for all, or one each. The rest: see `Request`.

    Raises:
        ValueError: see `Request`; also a size that the model cannot draw.
    """
    best = recommended(config)
    prompts = texts("prompt", prompt)
    negatives = () if negative_prompt is None else texts("negative prompt", negative_prompt)
    if isinstance(negative_prompt, str):
        negatives *= len(prompts)
    multiple, low, high = size_rule(config)
    return Request(
        prompts=prompts,
        negative_prompts=negatives,
        num_inference_steps=num_inference_steps,
        guidance_scale=best["guidance_scale"] if guidance_scale is None else guidance_scale,
        seed=seed,
        num_images_per_prompt=num_images_per_prompt,
        height=check_size("height", best["height"] if height is None else height, multiple, low, high),
        width=check_size("width", best["width"] if width is None else width, multiple, low, high),
        solver=solver,
        shift=best["shift"] if shift is None else shift,
        given_latents=given_latents,
        switches=switches,
        frames=check_frames(best["frames"] if frames is None else frames, config),
    )


def shown(value) -> str:
    """A value as an error quotes it: on one line, not longer than forty characters."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def whole_number(name: str, value, low: int, high: int) -> int:
    """``value``, an integer or its text, as an int in ``low`` … ``high``."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        try:
            near = min(max(round(float(value)), low), high)
        except (TypeError, ValueError, OverflowError):
            near = low
        raise ValueError(f"{name} {shown(value)} is not a whole number; try {near}") from None
    if number < low:
        raise ValueError(f"{name} {shown(number)} is below {low}; try {low}")
    if number > high:
        raise ValueError(f"{name} {shown(number)} is above {high}; try {high}")
    return number


def real_number(name: str, value, near: float = 1) -> float:
    """``value``, a number or its text, as a finite float ≥ 0."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} {shown(value)} is not a number; try {near:g}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} {number} is not finite; try {near:g}")
    if number < 0:
        raise ValueError(f"{name} {number:g} is below 0; try 0")
    return number


def yes_or_no(name: str, value) -> bool:
    """``value``, if it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} {shown(value)} is neither True nor False; try True")
    return value


def share(name: str, value) -> float:
    """``value``, a number or its text, as a float in 0 … 1."""
    number = real_number(name, value, near=0.5)
    if number > 1:
        raise ValueError(f"{name} {number:g} is above 1; try 1")
    return number


def interval(name: str, value) -> tuple[float, float]:
    """``value``, two numbers or their text ``"0.2,0.9"``, as low < high, both in 0 … 1."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (tuple, list)) or len(parts) != 2:
        raise ValueError(f"{name} {shown(value)} is not two numbers; try 0.2,0.9")
    low, high = (share(name, part) for part in parts)
    if not low < high:
        raise ValueError(f"{name} {low:g},{high:g} is empty; try 0.2,0.9")
    return low, high


_SWITCH_RULES = {
    "attention_chunk": lambda name, value: whole_number(name, value, 1, 2**20),
    "vae_batch": lambda name, value: whole_number(name, value, 1, MAX_COUNT),
    "vae_tile": lambda name, value: whole_number(name, value, 2, 2**20),
    "vae_overlap": lambda name, value: whole_number(name, value, 0, 2**20),
    "step_cache": lambda name, value: real_number(name, value, near=0.1),
    "guidance_interval": interval,
    "guidance_rescale": share,
    "zero_steps": lambda name, value: whole_number(name, value, 0, MAX_STEPS),
}


def check_seed(value, count: int = 1) -> int:
    """``value`` as a seed: ``value + count − 1`` must still be a 64-bit integer."""
    try:
        seed = whole_number("seed", value, 0, MAX_SEED)
    except ValueError as error:
        near = str(error).rpartition("try ")[2]
        raise ValueError(f"seed {shown(value)} is not a 64-bit integer (0 to 2**64 - 1); try {near}") from None
    if seed + count - 1 > MAX_SEED:
        raise ValueError(f"seed {seed} leaves no 64-bit seeds for {count} pictures; try {MAX_SEED - count + 1}")
    return seed


def one_of(name: str, value, known: tuple[str, ...]) -> str:
    """``value`` if it is one of the known names."""
    if value in known:
        return value
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"{name} {shown(value)} is unknown; {hint}try one of {', '.join(known)}")


def check_size(name: str, value, multiple: int, low: int, high: int) -> int:
    """A side in pixels that the model can draw: a multiple of ``multiple`` in ``low`` … ``high``."""
    side = whole_number(name, value, low, high)
    if side % multiple:
        below = side // multiple * multiple
        raise ValueError(f"{name} {side} is not a multiple of {multiple}; try {below} or {below + multiple}")
    return side


def check_frames(value, config: dict) -> int:
    """A clip's number of frames, time_factor · k + 1 for a model whose VAE shrinks time; 1 for any other model."""
    factor = config["vae"].get("time_factor", 0)
    frames = whole_number("frames", value, 1, MAX_FRAMES if factor else 1)
    if factor and (frames - 1) % factor:
        below = (frames - 1) // factor * factor + 1
        raise ValueError(f"{frames} frames are not {factor}k + 1; try {below} or {below + factor}")
    return frames


def texts(name: str, value) -> tuple[str, ...]:
    """One text or several as a tuple; text that no file could hold is refused."""
    several = (value,) if isinstance(value, str) else value
    if not isinstance(several, Iterable) or isinstance(several, (bytes, Set, Mapping)):
        raise ValueError(f"{name} {shown(value)} is not text, nor a list of texts; try 'red apple'")
    several = tuple(several)
    for text in several:
        if not isinstance(text, str):
            raise ValueError(f"{name} {shown(text)} is not text; try 'red apple'")
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise ValueError(f"{name} {shown(text)} holds bytes that are not UTF-8; check the terminal's encoding")
    return several


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


# The model folder


class Model(NamedTuple):
    """What a model folder holds, ready to run."""

    dit: object
    vae: object
    text_encoder: object
    tokenizer: object
    config: dict
    fingerprint: str  # first 16 hex digits over all file hashes


def sha256(data: bytes) -> str:
    """Hash of a file's bytes, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def size_rule(config: dict) -> tuple[int, int, int]:
    """(multiple, smallest, largest) side in pixels that a model draws."""
    patch = config["dit"].get("patch", 4)
    multiple = config["vae"].get("factor", 4) * (patch[-1] if isinstance(patch, (list, tuple)) else patch)
    low, high = config.get("sizes", SIZES)
    return multiple, low, high


def check_model_folder(path: str | Path | None = None) -> dict:
    """Look a model folder over without loading it, and return its configuration. Takes milliseconds, imports no torch.

    Args:
        path: the folder; None is the model that ships with the package.

    Raises:
        ValueError: a missing, truncated or foreign file; the message names it.
    """
    folder = SHIPPED_MODEL if path is None else Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"model folder {folder} does not exist; it should hold config.json and {', '.join(WEIGHTS.values())}"
        )
    config = _read_json(folder / "config.json")
    if config.get("format") != FORMAT:
        found = shown(config.get("format"))
        raise ValueError(f"{folder / 'config.json'} has the format {found}; this version reads {FORMAT!r}")
    for part in ("sha256", *WEIGHTS):
        if not isinstance(config.get(part), dict):
            raise ValueError(f"{folder / 'config.json'} has no entry {part!r}; it is not a model's configuration")
    try:
        make_request(config, "")  # what it recommends can be drawn
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'} recommends what cannot be drawn: {error}") from None
    for name in (*WEIGHTS.values(), TOKENIZER):
        if name not in config["sha256"]:
            raise ValueError(f"{folder / 'config.json'} has no sha256 of {name}; save the model with save_model")
    for name in WEIGHTS.values():
        read_header(folder / name)
    _read_json(folder / TOKENIZER)
    return config


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise ValueError(f"model file {path} is missing; restore it, or give another model folder")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model file {path} is damaged: it is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"model file {path} is damaged: it is not a JSON object")
    return content


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


def load_model(path: str | Path | None = None, device: str = "cpu", dtype: str = "float32") -> Model:
    """Load a model folder: configuration, three safetensors files, tokenizer; every shape and every hash is checked.

    Args:
        path: the folder; None is the model that ships with the package.
        device: where the weights go. dtype: what they are converted to; the files may hold fp16.

    Raises:
        ValueError: a missing, truncated, wrong-shaped, foreign or altered file; the message names it.
    """
    from diffusion_engine.dit import DiT, DiTConfig
    from diffusion_engine.text_conditioning import PromptTokenizer, TextEncoder, TextEncoderConfig
    from diffusion_engine.vae import VAE, VAEConfig

    folder = SHIPPED_MODEL if path is None else Path(path)
    config = check_model_folder(folder)
    kinds = {"dit": (DiT, DiTConfig), "vae": (VAE, VAEConfig), "text_encoder": (TextEncoder, TextEncoderConfig)}
    parts = {}
    for part, (kind, settings) in kinds.items():
        parts[part] = load_part(folder, WEIGHTS[part], part, kind, settings, config, device, dtype)
    _check_hash(folder / TOKENIZER, (folder / TOKENIZER).read_bytes(), config)
    try:
        tokenizer = PromptTokenizer(str(folder / TOKENIZER), parts["text_encoder"].config.max_length)
    except Exception as error:  # the tokenizers library has no type of its own
        raise ValueError(f"model file {folder / TOKENIZER} is not a tokenizer: {error}") from None
    if tokenizer.vocab_size > (known := parts["text_encoder"].config.vocab_size):
        words = f"{tokenizer.vocab_size} tokens, the text encoder knows {known}"
        raise ValueError(f"model file {folder / TOKENIZER} does not fit config.json: {words}")
    return Model(**parts, tokenizer=tokenizer, config=config, fingerprint=fingerprint(config))


def load_part(folder: Path, name: str, part: str, kind, settings, config: dict, device: str, dtype: str):
    """One module of a model folder on its device, its file's shapes and hash checked."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    file, module = folder / name, _build(kind, settings, config[part], folder / "config.json", part)
    _check_shapes(file, {name: tuple(value.shape) for name, value in module.state_dict().items()})
    data = file.read_bytes()
    _check_hash(file, data, config)
    try:
        weights = load(data)
    except SafetensorError as error:
        raise ValueError(f"model file {file} is damaged: {error}; restore it") from None
    module.load_state_dict({name: value.to(torch.float32) for name, value in weights.items()}, assign=True)
    return module.to(device, getattr(torch, dtype)).eval().requires_grad_(False)


def _stored(module, dtype: str) -> bytes:
    """A module's weights as a safetensors file."""
    import torch
    from safetensors.torch import save

    return save({k: v.detach().to("cpu", getattr(torch, dtype)).contiguous() for k, v in module.state_dict().items()})


def fingerprint(config: dict) -> str:
    """One name for all files of a model: 16 hex digits."""
    return sha256(json.dumps({name: config["sha256"][name] for name in (*WEIGHTS.values(), TOKENIZER)}).encode())[:16]


def _build(kind, settings, values: dict, file: Path, part: str):
    """A module with uninitialised weights: they are all replaced, and no random number is drawn."""
    from torch.overrides import TorchFunctionMode

    class SkipInit(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__module__", None) == "torch.nn.init" or getattr(func, "__name__", "") in (
                "normal_",
                "uniform_",
            ):
                return args[0] if args else kwargs["tensor"]
            return func(*args, **(kwargs or {}))

    try:
        config = settings(**values)
        with SkipInit():
            return kind(config)
    except (TypeError, ValueError, ZeroDivisionError, RuntimeError) as error:
        raise ValueError(f"model file {file} does not describe a {part}: {str(error).splitlines()[0]}") from None


def _check_shapes(file: Path, expected: dict[str, tuple[int, ...]]) -> None:
    header = read_header(file)
    if missing := sorted(set(expected) - set(header)):
        raise ValueError(f"model file {file} lacks {len(missing)} of {len(expected)} tensors, {missing[0]} first")
    if unknown := sorted(set(header) - set(expected)):
        raise ValueError(f"model file {file} has {len(unknown)} tensors that the model lacks, {unknown[0]} first")
    for name, shape in expected.items():
        if header[name]["shape"] != shape:
            found = f"{name} has shape {list(header[name]['shape'])}"
            raise ValueError(f"model file {file} does not fit config.json: {found}, expected {list(shape)}")
        if header[name]["dtype"] not in ("F64", "F32", "F16", "BF16"):
            raise ValueError(f"model file {file} holds {header[name]['dtype']} in {name}; expected F32, F16 or BF16")


def _check_hash(file: Path, data: bytes, config: dict) -> None:
    expected = config["sha256"][file.name]
    if sha256(data) != expected:
        found = f"sha256 {sha256(data)[:12]}…, config.json says {shown(expected)[:14]}…"
        raise ValueError(f"model file {file} was altered or belongs to another model: {found}; restore it")


def save_model(
    folder: str | Path, *, dit, vae, text_encoder, tokenizer: str, recommended: dict, dtype: str = "float16"
) -> dict:
    """Write a model folder that `load_model` reads, each file whole or not at all; returns its configuration.

    Args:
        dit, vae, text_encoder: modules with a ``config`` dataclass.
        tokenizer: the content of ``tokenizer.json``.
        recommended: ``guidance_scale``, ``num_inference_steps``, ``shift``, ``height``, ``width``.
        dtype: what the weights are stored in.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    modules = {"dit": dit, "vae": vae, "text_encoder": text_encoder}
    contents = {TOKENIZER: tokenizer.encode()} | {WEIGHTS[part]: _stored(m, dtype) for part, m in modules.items()}
    config = {"format": FORMAT, **{part: asdict(module.config) for part, module in modules.items()}}
    config |= {"recommended": dict(recommended), "sizes": list(SIZES)}
    config["sha256"] = {name: sha256(data) for name, data in contents.items()}
    contents["config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    write_files({folder / name: data for name, data in contents.items()})
    return config


# The clip model's folder: a VAE, a refiner and a DiT for clips; the text encoder and tokenizer are the picture model's


def check_clip_folder(path: str | Path | None = None) -> dict:
    """Look a clip model's folder over without loading it; see `check_model_folder`.

    Raises:
        ValueError: a missing, truncated or foreign file, or another text encoder in the package than it was trained over.
    """
    folder = SHIPPED_CLIP_MODEL if path is None else Path(path)
    if not folder.is_dir():
        names = ", ".join(CLIP_WEIGHTS.values())
        raise ValueError(f"clip model folder {folder} does not exist; it should hold config.json and {names}")
    config = _read_json(folder / "config.json")
    if config.get("format") != CLIP_FORMAT:
        found = shown(config.get("format"))
        raise ValueError(f"{folder / 'config.json'} has the format {found}; animate reads {CLIP_FORMAT!r}")
    for part in ("sha256", "text", "dit", "vae", "recommended"):
        if not isinstance(config.get(part), dict):
            raise ValueError(f"{folder / 'config.json'} has no entry {part!r}; it is not a clip model's configuration")
    for name in CLIP_WEIGHTS.values():
        if name not in config["sha256"]:
            raise ValueError(f"{folder / 'config.json'} has no sha256 of {name}; save the model with save_clip_model")
        read_header(folder / name)
    text = check_model_folder()["sha256"]
    if any(text.get(name) != digest for name, digest in config["text"].items()):
        raise ValueError(f"{folder} was trained over another text encoder than {SHIPPED_MODEL} holds; restore both")
    return config


def clip_fingerprint(config: dict) -> str:
    """One name for all files of a clip model, the text files included: 16 hex digits."""
    names = {name: config["sha256"][name] for name in CLIP_WEIGHTS.values()}
    return sha256(json.dumps(names | config["text"]).encode())[:16]


def save_clip_model(folder: str | Path, *, dit, vae, refiner, recommended: dict, dtype: str = "float16") -> dict:
    """Write a folder that `engine.load_clip_model` reads, each file whole or not at all; returns its configuration.

    Args:
        dit, vae, refiner: modules with a ``config`` dataclass. dtype: what the weights are stored in.
        recommended: ``guidance_scale``, ``num_inference_steps``, ``shift``, ``height``, ``width``, ``frames``.
    """
    folder, modules = Path(folder), {"dit": dit, "vae": vae, "refiner": refiner}
    folder.mkdir(parents=True, exist_ok=True)
    contents = {CLIP_WEIGHTS[part]: _stored(module, dtype) for part, module in modules.items()}
    config = {"format": CLIP_FORMAT, **{part: asdict(module.config) for part, module in modules.items()}}
    config |= {"recommended": dict(recommended), "sizes": list(CLIP_SIZES)}
    config["sha256"] = {name: sha256(data) for name, data in contents.items()}
    text = check_model_folder()["sha256"]
    config["text"] = {name: text[name] for name in (WEIGHTS["text_encoder"], TOKENIZER)}
    contents["config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    write_files({folder / name: data for name, data in contents.items()})
    return config
