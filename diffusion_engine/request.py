"""What a picture is made from: a checked request, and the switches of how it is computed.

Nothing here imports torch, so that a wrong argument is named at once.
"""

import difflib
import math
import operator
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, fields, replace

SIZES = (32, 128)  # pixels a side that are accepted when config.json does not say
SOLVERS = ("euler", "heun", "multistep")
DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("float32", "bfloat16", "float16")
MAX_STEPS = 1_000
MAX_FRAMES = 257
MAX_COUNT = 1_000
MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class Switches:
    """How the arithmetic of a run is done. As it stands, all that is exact and never slower is on, all else off.

    Exact up to rounding:
        batched_cfg: both sides of guidance in one forward. attention_chunk: queries handled at a time.
        vae_batch: pictures decoded at a time. vae_tile, vae_overlap: in tiles of this many latents a side. latent_buffer: latents allocated once.
        prompt_cache: keep prompt embeddings. hoist: work out once what no latent changes. compile: `torch.compile` the blocks.
        upcast: on the CPU, keep bfloat16 or float16 but multiply in float32; off, a processor without them is slow.

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
    upcast: bool = False
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


def size_rule(config: dict) -> tuple[int, int, int]:
    """(multiple, smallest, largest) side in pixels that a model draws."""
    patch = config["dit"].get("patch", 4)
    multiple = config["vae"].get("factor", 4) * (patch[-1] if isinstance(patch, (list, tuple)) else patch)
    low, high = config.get("sizes", SIZES)
    return multiple, low, high


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
