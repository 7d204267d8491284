"""The command line. Arguments, files and folders are looked over before torch is imported, so mistakes are named at once."""

import functools
import inspect
import json
import math
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from diffusion_engine import __version__
from diffusion_engine.files import (
    CLIP_SUFFIXES,
    RECORD,
    animation,
    check_output,
    gif,
    png,
    read_clip_record,
    read_header,
    read_record,
    request_of,
    write_files,
)
from diffusion_engine.model_folder import (
    SHIPPED_MODEL,
    TOKENIZER,
    WEIGHTS,
    check_clip_folder,
    check_model_folder,
    clip_fingerprint,
    fingerprint,
)
from diffusion_engine.request import (
    DEVICES,
    DTYPES,
    SOLVERS,
    Request,
    Switches,
    make_request,
    one_of,
    real_number,
    recommended,
    size_rule,
    whole_number,
)

BAD_INPUT, INTERRUPTED = 2, 130
USAGE_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
TRACE_SIDE = 256  # pixels that a trace's small pictures are enlarged to

commands = typer.Typer(
    name="diffusion-engine",
    help="Draw pictures from text with a small model that ships inside. Works offline.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main(args: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for bad input (one line on stderr), 130 for an interrupt."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = commands(args, prog_name="diffusion-engine", standalone_mode=False) or 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except USAGE_ERROR as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "diffusion-engine"
        return _say("error", f"{error.format_message().rstrip('.')}; see {where} --help", BAD_INPUT)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _say("error", f"{where}{error.strerror or error}", BAD_INPUT)
    except (ValueError, ArithmeticError) as error:
        return _say("error", str(error), BAD_INPUT)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return _say(
            "error", "there is not enough memory for this; try a smaller --count, --height or --width", BAD_INPUT
        )
    return _say("interrupted", "no file was left half-written", INTERRUPTED) if code == INTERRUPTED else code


def _say(kind: str, message: str, code: int = 0) -> int:
    """One line on stderr."""
    print(f"{kind}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


@commands.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


SWITCH_OPTIONS = {  # name → metavar, None for yes or no; and what it does
    "batched_cfg": (None, "Ask with and without the prompt in one forward.  [default: yes]"),
    "attention_chunk": ("N", "Queries that attention handles at a time; exact, saves memory."),
    "vae_batch": ("N", "Pictures or clips decoded at a time; exact, saves memory."),
    "vae_tile": ("N", "Decode in tiles of at most N latents a side; saves memory."),
    "vae_overlap": ("N", "Latents that tiles share.  [default: 8]"),
    "latent_buffer": (None, "Allocate the latents once; exact."),
    "prompt_cache": (None, "Keep prompt embeddings; exact.  [default: yes]"),
    "hoist": (None, "Work out once, for all steps, what no latent changes; exact up to rounding."),
    "compile": (None, "Compile the blocks; the first picture waits for it."),
    "upcast": (None, "Keep bfloat16 or float16, multiply in float32, for a CPU that lacks them."),
    "step_cache": ("X", "Guess most blocks where a step changes little, try 0.1; another picture."),
    "guidance_interval": ("LOW,HIGH", "Guide at these noise levels only, 0,1 is all; another picture."),
    "guidance_rescale": ("X", "Rescale guidance, 0 to 1; another picture."),
    "cfg_zero_star": (None, "CFG-Zero*'s projection; another picture."),
    "zero_steps": ("N", "First steps that stand still; another picture."),
}


def takes_switches(command: Callable) -> Callable:
    """Give a command every switch as an option; it is called with those that were given, as ``switches``."""

    @functools.wraps(command)
    def called(**given):
        switches = {name: given.pop(name) for name in SWITCH_OPTIONS}
        return command(**given, switches={name: value for name, value in switches.items() if value is not None})

    parameters = [p for p in inspect.signature(command).parameters.values() if p.name != "switches"]
    for name, (metavar, text) in SWITCH_OPTIONS.items():
        flag = name.replace("_", "-")
        option = typer.Option(f"--{flag}" if metavar else f"--{flag}/--no-{flag}", metavar=metavar, help=text)
        kind = Annotated[(str if metavar else bool) | None, option]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind))
    called.__signature__ = inspect.Signature(parameters)
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


@commands.command()
@takes_switches
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="What to draw, in English or Chinese.", show_default=False)
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write; several become NAME_0.png …")] = Path(
        "picture.png"
    ),
    steps: Annotated[str | None, typer.Option(metavar="N", help="Steps, 1 to 1000.  [default: 28]")] = None,
    guidance: Annotated[
        str | None, typer.Option(metavar="W", help="Guidance scale, 0 or more.  [default: the model's]")
    ] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Picture i uses seed + i.  [default: 0]")] = None,
    count: Annotated[str | None, typer.Option(metavar="N", help="How many pictures.  [default: 1]")] = None,
    negative: Annotated[str | None, typer.Option(metavar="TEXT", help="What to steer away from.")] = None,
    solver: Annotated[str | None, typer.Option(metavar="NAME", help=f"{', '.join(SOLVERS)}.  [default: euler]")] = None,
    shift: Annotated[
        str | None, typer.Option(metavar="K", help="Shift of the schedule.  [default: the model's]")
    ] = None,
    height: Annotated[str | None, typer.Option(metavar="PIXELS", help="[default: the model's]")] = None,
    width: Annotated[str | None, typer.Option(metavar="PIXELS", help="[default: the model's]")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.gif", help="Also write how the picture came about.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help=f"{', '.join(DEVICES)}.  [default: auto]")] = None,
    dtype: Annotated[str | None, typer.Option(metavar="NAME", help=f"{', '.join(DTYPES)}.  [default: float32]")] = None,
    model: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Another model folder.")] = None,
    like: Annotated[Path | None, typer.Option(metavar="PICTURE.png", help="Draw this picture again.")] = None,
    memory_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help='Stay below it, such as "2 GB": says what it chose.')
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Count bytes instead of time.")] = False,
    *,
    switches: dict,
) -> None:
    """Draw pictures from a prompt, or one again with --like."""
    settings = {
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "seed": seed,
        "num_images_per_prompt": count,
        "negative_prompt": negative,
        "solver": solver,
        "shift": shift,
        "height": height,
        "width": width,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    record = None
    if like is not None:
        if prompt is not None or settings or switches or memory_budget is not None:
            raise ValueError(
                "--like repeats everything that made a picture; with it only -o, --trace, --model, --device, --dtype, "
                "--profile go"
            )
        record = read_record(like)
    elif prompt is None:
        raise ValueError('a prompt is missing; try: diffusion-engine generate "red apple" -o apple.png')
    device = one_of("device", (record or {}).get("device", "auto") if device is None else device, DEVICES)
    dtype = one_of("dtype", (record or {}).get("dtype", "float32") if dtype is None else dtype, DTYPES)
    config = check_model_folder(model)
    if record is None:
        request = make_request(config, prompt, **settings, switches=Switches.of(switches))
    else:
        request = _repeated(record, fingerprint(config), like)
    chosen = range(len(request.seeds)) if record is None else [record["index"]]
    paths = [check_output(path, ".png") for path in _names(output, len(chosen))]
    if trace is not None:
        check_output(trace, ".gif")
    _draw(request, list(chosen), paths, trace, (model, device, dtype), record, like, memory_budget, profile)


@commands.command()
@takes_switches
def animate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="What to draw and how it moves: 'cat face, spinning', '猫脸，旋转'.", show_default=False),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A .gif, .webp or .mp4; several become NAME_0.gif …")
    ] = Path("clip.gif"),
    steps: Annotated[str | None, typer.Option(metavar="N", help="Steps, 1 to 1000.  [default: 28]")] = None,
    guidance: Annotated[
        str | None, typer.Option(metavar="W", help="Guidance scale, 0 or more.  [default: the model's]")
    ] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Clip i uses seed + i.  [default: 0]")] = None,
    count: Annotated[str | None, typer.Option(metavar="N", help="How many clips.  [default: 1]")] = None,
    negative: Annotated[str | None, typer.Option(metavar="TEXT", help="What to steer away from.")] = None,
    solver: Annotated[str | None, typer.Option(metavar="NAME", help=f"{', '.join(SOLVERS)}.  [default: euler]")] = None,
    shift: Annotated[
        str | None, typer.Option(metavar="K", help="Shift of the schedule.  [default: the model's]")
    ] = None,
    frames: Annotated[str | None, typer.Option(metavar="N", help="4k + 1 frames.  [default: the model's]")] = None,
    height: Annotated[str | None, typer.Option(metavar="PIXELS", help="[default: the model's]")] = None,
    width: Annotated[str | None, typer.Option(metavar="PIXELS", help="[default: the model's]")] = None,
    scale: Annotated[str | None, typer.Option(metavar="N", help="Magnify the file N times.  [default: 4]")] = None,
    sheet: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Also write all frames side by side.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.gif", help="Also write how all frames come about, step by step.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help=f"{', '.join(DEVICES)}.  [default: auto]")] = None,
    dtype: Annotated[str | None, typer.Option(metavar="NAME", help=f"{', '.join(DTYPES)}.  [default: float32]")] = None,
    model: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Another clip model's folder.")] = None,
    like: Annotated[Path | None, typer.Option(metavar="CLIP.gif", help="Draw this clip again.")] = None,
    memory_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help='Stay below it, such as "2 GB": says what it chose.')
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Count bytes alone, not time beside them.")] = False,
    *,
    switches: dict,
) -> None:
    """Draw clips from a prompt, or one again with --like."""
    settings = {
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "seed": seed,
        "num_images_per_prompt": count,
        "negative_prompt": negative,
        "solver": solver,
        "shift": shift,
        "height": height,
        "width": width,
        "frames": frames,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    record = None
    if like is not None:
        if prompt is not None or settings or scale is not None or switches or memory_budget is not None:
            raise ValueError(
                "--like repeats everything that made a clip; with it only -o, --sheet, --trace, --model, --device, --dtype, "
                "--profile go"
            )
        record = read_clip_record(like)
    elif prompt is None:
        raise ValueError('a prompt is missing; try: diffusion-engine animate "cat face, spinning" -o cat.gif')
    device = one_of("device", (record or {}).get("device", "auto") if device is None else device, DEVICES)
    dtype = one_of("dtype", (record or {}).get("dtype", "float32") if dtype is None else dtype, DTYPES)
    factor = whole_number("scale", (record or {}).get("scale", 4) if scale is None else scale, 1, 32)
    config = check_clip_folder(model)
    if record is None:
        request = make_request(config, prompt, **settings, switches=Switches.of(switches))
    else:
        request = _repeated(record, clip_fingerprint(config), like)
    chosen = range(len(request.seeds)) if record is None else [record["index"]]
    paths = [check_output(path, CLIP_SUFFIXES) for path in _names(output, len(chosen))]
    if sheet is not None:
        check_output(sheet, ".png")
    if trace is not None:
        check_output(trace, ".gif")
    source = model, device, dtype
    _animate(request, list(chosen), paths, sheet, trace, factor, source, record, like, memory_budget, profile)


def _names(output: Path, count: int) -> list[Path]:
    """``apple.png`` for one picture, ``apple_0.png`` … for several."""
    return [output] if count == 1 else [output.with_stem(f"{output.stem}_{i}") for i in range(count)]


def _repeated(record: dict, model: str, like: Path) -> Request:
    """The request in a record, if this model can repeat it."""
    request = request_of(record)
    if request.given_latents:
        raise ValueError(f"{like} started from latents that a program handed in; they are not in the file")
    if record.get("model") != model:
        raise ValueError(f"{like} was drawn by model {record.get('model')}, this is {model}; give its --model")
    return request


def _draw(
    request: Request,
    chosen: list[int],
    paths: list[Path],
    trace: Path | None,
    source: tuple[Path | None, str, str],
    record: dict | None,
    like: Path | None,
    memory_budget: str | None = None,
    profile: bool = False,
) -> None:
    """Draw, write everything at once, print the paths; ``source`` is model folder, device, dtype."""
    before = None if record is None else _pixels(like)  # the output may take its place
    keep = [] if trace is None else chosen
    engine, result, previews = _run("TextToImage", request, source, record, memory_budget, profile, keep)
    images = [result.images[i] for i in chosen]
    contents = {path: png(image) for path, image in zip(paths, images)}
    if trace is not None:
        contents[trace] = gif([_row(engine.decode(data)) for data in previews] + [_row(images)])
    write_files(contents)
    _report(engine, result, f"{len(result.seeds)} × {request.num_inference_steps} steps")
    if record is not None:
        _compare(_same(images[0], before), "pixel", like, record, engine)
    for path in contents:
        print(path)


def _run(
    kind: str, request: Request, source: tuple, record: dict | None, memory_budget, profile: bool, keep: list[int]
):
    """Import torch and draw with an engine of this kind: the engine, its result, and every step's previews to ``keep``."""
    with _progress(request) as bar, warnings.catch_warnings():
        import torch

        from diffusion_engine import engine as engines

        if record is not None:
            threads = record.get("threads", torch.get_num_threads())
            torch.set_num_threads(whole_number("threads", threads, 1, 1024))
        engine, previews = getattr(engines, kind).from_pretrained(*source), []

        def watch(info) -> None:
            bar.update()
            if keep:
                previews.append(info.data[keep].clone())

        warnings.simplefilter("ignore")
        warnings.simplefilter("always", engines.EngineWarning)
        warnings.showwarning = lambda message, *_: (bar.clear(), _say("warning", str(message)))
        bar.reset()  # the time that is left is told from the steps alone
        bar.set_description_str(request.prompts[0][:24])
        if memory_budget is not None:
            plan = engine.plan(request, memory_budget)
            request = engine.within(request, plan)
            bar.clear()
            _say("plan", str(plan).replace("\n", "; "))
        return engine, engine.draw(request, callback=watch, profile=profile), previews


def _report(engine, result, drawn: str) -> None:
    """Say what was drawn, with the bytes and the time of each stage, as far as they were counted."""
    from diffusion_engine.memory_manager import format_bytes, weight_bytes

    if result.peak_bytes:
        peaks = ", ".join(f"{stage} {format_bytes(count)}" for stage, count in result.peak_bytes.items())
        _say("memory", f"weights {format_bytes(weight_bytes(*engine.parts))}; peak above them: {peaks}")
    stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in result.seconds.items()) or "bytes, not time"
    _say("drawn", f"{drawn} on {engine.device}: {stages}")


def _compare(same: bool, what: str, like: Path, record: dict, engine) -> None:
    """Say whether it came out the same, and if not, what may be the reason."""
    import torch

    if same:
        _say("same", f"every {what} as in {like}")
        return
    then = f"torch {record.get('torch')} on {record.get('device')} in {record.get('dtype')}"
    now = f"torch {torch.__version__} on {engine.device} in {engine.dtype}"
    reason = f"drawn with {then}; this is {now}, or another machine, or it was edited"
    _say("warning", f"not every pixel is as in {like}, {reason}")


def _progress(request: Request):
    """A bar on stderr, where somebody looks at it."""
    from tqdm import tqdm

    shape = "{desc} {bar} {n}/{total} steps, {remaining} left"
    watched = sys.stderr.isatty()
    return tqdm(total=request.num_inference_steps, desc="loading", bar_format=shape, leave=False, disable=not watched)


def _row(images: list):
    """Pictures side by side, small ones enlarged."""
    from PIL import Image

    width, height = images[0].size
    row = Image.new("RGB", (width * len(images), height))
    for i, image in enumerate(images):
        row.paste(image, (i * width, 0))
    factor = max(1, TRACE_SIDE // height)
    return row.resize((row.width * factor, row.height * factor), Image.Resampling.NEAREST)


def _pixels(path: Path):
    """A picture, read into memory."""
    from PIL import Image

    with Image.open(path) as picture:
        return picture.copy()


def _same(a, b) -> bool:
    """Whether two pictures are the same to the last bit."""
    return a.mode == b.mode and a.size == b.size and a.tobytes() == b.tobytes()


def _animate(
    request: Request,
    chosen: list[int],
    paths: list[Path],
    sheet: Path | None,
    trace: Path | None,
    scale: int,
    source: tuple[Path | None, str, str],
    record: dict | None,
    like: Path | None,
    memory_budget: str | None,
    profile: bool,
) -> None:
    """Draw clips, write everything at once, print peak bytes, time and paths; ``source`` as in `_draw`."""
    before = None if record is None else like.read_bytes()  # the output may take its place
    keep = [] if trace is None else chosen
    engine, result, previews = _run("TextToVideo", request, source, record, memory_budget, profile, keep)
    clips = [result.clips[i] for i in chosen]
    for clip in clips:
        clip[0].info[RECORD] = json.dumps(json.loads(clip[0].info[RECORD]) | {"scale": scale}, ensure_ascii=False)
    contents = {path: animation(clip, path.suffix.lower(), scale=scale) for path, clip in zip(paths, clips)}
    if sheet is not None:
        contents[sheet] = png(_sheet(clips, scale))
    if trace is not None:
        contents[trace] = gif([_sheet(engine.decode(data), 2) for data in previews] + [_sheet(clips, 2)])
    write_files(contents)
    _report(engine, result, f"{len(result.seeds)} × {request.frames} frames, {request.num_inference_steps} steps")
    if record is not None:
        clips[0][0].info[RECORD] = json.dumps(record, ensure_ascii=False)
        _compare(animation(clips[0], like.suffix.lower(), scale=scale) == before, "byte", like, record, engine)
    for path in contents:
        print(path)


def _sheet(clips: list, scale: int):
    """A contact sheet: a clip a row, a frame a column."""
    from PIL import Image

    width, height = (side * scale for side in clips[0][0].size)
    sheet = Image.new("RGB", (width * len(clips[0]), height * len(clips)), "white")
    for row, clip in enumerate(clips):
        for column, frame in enumerate(clip):
            large = frame.resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(large, (column * width, row * height))
    return sheet


@commands.command()
def show(picture: Annotated[Path, typer.Argument(help="A picture or clip that diffusion-engine wrote.")]) -> None:
    """Print what made a picture or a clip."""
    clip = picture.suffix.lower() in CLIP_SUFFIXES
    record = read_clip_record(picture) if clip else read_record(picture)
    request, index = request_of(record), record["index"]
    total = len(request.seeds)
    rows = {
        "prompt": request.every_prompt[index],
        "negative": request.every_negative[index] if request.negative_prompts else "",
        "seed": request.seeds[index],
        "picture": f"{index + 1} of {total}"
        + (f" (seeds {request.seeds[0]} … {request.seeds[-1]})" if total > 1 else ""),
        "steps": request.num_inference_steps,
        "guidance": f"{request.guidance_scale:g}",
        "solver": request.solver,
        "shift": f"{request.shift:g}",
        "size": f"{request.width}×{request.height}" + (f", {request.frames} frames" if clip else ""),
        "latents": "handed in by a program" if request.given_latents else "",
        "switches": ", ".join(f"{name} {_plain(value)}" for name, value in request.switches.changed.items()),
        "model": record.get("model"),
        "made with": f"diffusion-engine {record.get('engine')}, torch {record.get('torch')}, {record.get('device')}, "
        f"{record.get('dtype')}, {record.get('threads')} threads",
        "again": ""
        if request.given_latents
        else f"diffusion-engine {'animate' if clip else 'generate'} --like {shlex.quote(str(picture))} "
        f"-o again{picture.suffix.lower()}",
    }
    _table({name: value for name, value in rows.items() if value != ""})


def _plain(value) -> str:
    """A switch's value as one types it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(f"{part:g}" for part in value) if isinstance(value, tuple) else f"{value:g}"


@commands.command()
def info(
    model: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Another model folder.")] = None,
) -> None:
    """Print the model, what it can draw, and this machine's devices."""
    folder = SHIPPED_MODEL if model is None else model
    config = check_model_folder(folder)
    multiple, low, high = size_rule(config)
    best = recommended(config)
    headers = {part: read_header(folder / name) for part, name in WEIGHTS.items()}
    counts = ", ".join(f"{part} {_parameters(header) / 1e6:.1f} M" for part, header in headers.items())
    kinds = sorted({entry["dtype"] for header in headers.values() for entry in header.values()})
    megabytes = sum((folder / name).stat().st_size for name in (*WEIGHTS.values(), TOKENIZER)) / 1e6
    import torch

    from diffusion_engine.engine import available_devices

    rows = {
        "diffusion-engine": __version__,
        "model": folder,
        "fingerprint": fingerprint(config),
        "parameters": f"{counts}; {'/'.join(kinds)}, {megabytes:.1f} MB",
        "draws": f"{best['width']}×{best['height']}; other sides from {low} to {high} in steps of {multiple}",
        "recommended": f"guidance {best['guidance_scale']:g}, shift {best['shift']:g}, {best['num_inference_steps']} steps",
        "prompts": f"up to {config['text_encoder'].get('max_length', 24)} tokens, English or Chinese",
        "solvers": ", ".join(SOLVERS),
        "dtypes": ", ".join(DTYPES),
        "devices": ", ".join(available_devices()),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
    }
    _table(rows)


PICTURE_FAMILIES = ("sd3", "flux", "sana")  # what diffusion_engine.reference.run draws
CLIP_FAMILIES = ("wan", "ltx", "cogvideox", "hunyuan_video")


@commands.command()
def reference(
    family: Annotated[
        str | None, typer.Argument(help=f"{', '.join(PICTURE_FAMILIES + CLIP_FAMILIES)}.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="PATH_OR_ID", help="A folder or a hub id.  [default: the family's own]")
    ] = None,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What to draw.")] = "a red apple on a wooden table",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write.  [default: picture.png, or clip.gif; also .webp, .mp4]"),
    ] = None,
    negative: Annotated[str, typer.Option(metavar="TEXT", help="What to steer away from.")] = "",
    steps: Annotated[str | None, typer.Option(metavar="N", help="[default: the family's]")] = None,
    guidance: Annotated[str | None, typer.Option(metavar="W", help="[default: the family's]")] = None,
    seed: Annotated[str, typer.Option(metavar="N", help="A whole number.")] = "0",
    height: Annotated[str | None, typer.Option(metavar="PIXELS", help="[default: the family's]")] = None,
    width: Annotated[str | None, typer.Option(metavar="PIXELS", help="[default: the family's]")] = None,
    frames: Annotated[str | None, typer.Option(metavar="N", help="Of a clip.  [default: the family's]")] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(DEVICES)}.")] = "auto",
    dtype: Annotated[str | None, typer.Option(metavar="NAME", help="[default: bfloat16; float32 with --tiny]")] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch a hub id that is not in the cache.")] = False,
    offload: Annotated[bool, typer.Option("--offload", help="Hold one part in memory at a time.")] = False,
    hoist: Annotated[
        bool, typer.Option("--hoist", help="Make once, for all steps, what looks at no latent; exact up to rounding.")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Measure each stage; also writes NAME.svg.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run diffusers beside it and print the differences.")
    ] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Very small random weights, made on the spot.")] = False,
    families: Annotated[bool, typer.Option("--list", help="Families, bytes needed, and what runs here.")] = False,
) -> None:
    """Draw with a real family, its text encoders and VAE borrowed from diffusers: pictures with SD3, FLUX and Sana, clips
    with Wan, LTX, CogVideoX and HunyuanVideo."""
    from importlib.util import find_spec

    given = {"height": height, "width": width, "frames": frames}
    sides = {name: whole_number(name, value, 1, 2**16) for name, value in given.items() if value is not None}
    if families:
        from diffusion_engine.reference.run import Order, list_families

        for row in list_families(Order(**sides)):
            _table(row)
            print()
        return
    one_of("family", family or "(none)", PICTURE_FAMILIES + CLIP_FAMILIES)
    is_clip = family in CLIP_FAMILIES
    if tiny:
        sides = {"height": 64, "width": 96, "frames": 9 if is_clip else 1} | sides
    asked = {"steps": None if steps is None else whole_number("steps", steps, 1, 1000)}
    asked |= {"guidance": None if guidance is None else real_number("guidance", guidance, near=4)}
    asked |= {"seed": whole_number("seed", seed, 0, 2**32 - 1), "prompt": prompt, "negative": negative} | sides
    output = check_output(output or ("clip.gif" if is_clip else "picture.png"), CLIP_SUFFIXES if is_clip else ".png")
    dtype = one_of("dtype", ("float32" if tiny else "bfloat16") if dtype is None else dtype, DTYPES)
    if find_spec("diffusers") is None or find_spec("transformers") is None:
        raise ValueError("diffusers and transformers are not installed; try pip install diffusers transformers")
    _reference(
        family,
        model,
        asked,
        output,
        (one_of("device", device, DEVICES), dtype),
        download,
        (offload, hoist),
        profile,
        compare,
        tiny,
    )


def _reference(family, model, asked, output, where, download, ways, profile, compare, tiny) -> None:
    """Import torch, draw, write, and say what was measured."""
    import os
    import tempfile

    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error"}
    import numpy as np
    import torch
    from tqdm import tqdm

    from diffusion_engine.engine import choose_device
    from diffusion_engine.memory_manager import format_bytes
    from diffusion_engine.reference import run
    from diffusion_engine.reference.families import FAMILIES
    from diffusion_engine.reference.tiny import write_tiny

    with tempfile.TemporaryDirectory() as room, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = (
            write_tiny(family, room) if tiny else run.find_pipeline(model or FAMILIES[family].facts.hub, download)
        )
        device, order = choose_device(where[0]), run.Order(**asked)
        parts = run.Parts(folder, family, device, getattr(torch, where[1]), *ways)
        if parts.upcast:
            _say("note", f"this processor has no instructions for {where[1]}: it is kept so and multiplied in float32")
        total = order.within(FAMILIES[family]).steps
        with tqdm(total=total, desc=family, leave=False, disable=not sys.stderr.isatty()) as bar:
            result = run.draw(parts, order, callback=lambda info: bar.update() and None)
        frame_time = round(1000 / FAMILIES[family].fps)
        is_clip, suffix = FAMILIES[family].is_clip, output.suffix.lower()
        contents = {output: animation(result.images, suffix, frame_time) if is_clip else png(result.images[0])}
        stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in result.seconds.items())
        _say("drawn", f"latents {tuple(result.latents.shape)}, {total} steps on {device} in {where[1]}: {stages}")
        _, tokens = run.latent_shape(parts, order.within(parts.family))
        pictures = f"{len(result.images)} of {result.images[0].size}"
        flow = f"latents {tuple(result.latents.shape)}, {tokens} tokens, pictures {pictures}"
        if tiny:  # read once more for their shape; real encoders would take their time again
            flow = f"text {tuple(run.encode(parts, (order.prompt, ''))[0].tokens.shape)}, {flow}"
        _say("shapes", flow)
        if profile:
            measured = run.profile(parts, order)
            contents[output.with_suffix(".svg")] = run.profile_picture(measured).encode()
            peaks = ", ".join(f"{stage} {format_bytes(count)}" for stage, (_, count) in measured.items())
            _say("peak", f"{peaks}, above what was loaded before")
        if compare:
            latents, pictures = run.draw_theirs(parts, order)
            levels = max(np.abs(np.subtract(a, b, dtype=int)).max() for a, b in zip(pictures, result.images))
            off = (latents - result.latents).abs().max()
            _say("compare", f"largest difference to diffusers: latents {off:.1e}, picture {levels} of 255 levels")
    write_files(contents)
    for path in contents:
        print(path)


def _parameters(header: dict) -> int:
    return sum(math.prod(entry["shape"]) for entry in header.values())


def _table(rows: dict) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
