"""The command line. Arguments, files and folders are looked over before torch is imported, so mistakes are named at once."""

import math
import shlex
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from diffusion_engine import __version__
from diffusion_engine.files import (
    DEVICES,
    DTYPES,
    SHIPPED_MODEL,
    SOLVERS,
    TOKENIZER,
    WEIGHTS,
    Request,
    check_model_folder,
    check_output,
    fingerprint,
    gif,
    make_request,
    one_of,
    png,
    read_header,
    read_record,
    recommended,
    request_of,
    size_rule,
    whole_number,
    write_files,
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
    return _say("interrupted", "nothing was written", INTERRUPTED) if code == INTERRUPTED else code


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


@commands.command()
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
        if prompt is not None or settings:
            raise ValueError(
                "--like repeats everything that made a picture; with it only -o, --trace, --model, --device, --dtype go"
            )
        record = read_record(like)
    elif prompt is None:
        raise ValueError('a prompt is missing; try: diffusion-engine generate "red apple" -o apple.png')
    device = one_of("device", device or (record or {}).get("device", "auto"), DEVICES)
    dtype = one_of("dtype", dtype or (record or {}).get("dtype", "float32"), DTYPES)
    config = check_model_folder(model)
    request = make_request(config, prompt, **settings) if record is None else _repeated(record, config, like)
    chosen = range(len(request.seeds)) if record is None else [record["index"]]
    paths = [check_output(path, ".png") for path in _names(output, len(chosen))]
    if trace is not None:
        check_output(trace, ".gif")
    _draw(request, list(chosen), paths, trace, (model, device, dtype), record, like)


def _names(output: Path, count: int) -> list[Path]:
    """``apple.png`` for one picture, ``apple_0.png`` … for several."""
    return [output] if count == 1 else [output.with_stem(f"{output.stem}_{i}") for i in range(count)]


def _repeated(record: dict, config: dict, like: Path) -> Request:
    """The request in a record, if this model can repeat it."""
    request = request_of(record)
    if request.given_latents:
        raise ValueError(f"{like} started from latents that a program handed in; they are not in the file")
    if record.get("model") != fingerprint(config):
        raise ValueError(
            f"{like} was drawn by model {record.get('model')}, this is {fingerprint(config)}; give its --model"
        )
    return request


def _draw(
    request: Request,
    chosen: list[int],
    paths: list[Path],
    trace: Path | None,
    source: tuple[Path | None, str, str],
    record: dict | None,
    like: Path | None,
) -> None:
    """Import torch, draw, write everything at once, print the paths; ``source`` is model folder, device, dtype."""
    with _progress(request) as bar, warnings.catch_warnings():
        import torch

        from diffusion_engine.engine import EngineWarning, TextToImage

        if record is not None:
            threads = record.get("threads", torch.get_num_threads())
            torch.set_num_threads(whole_number("threads", threads, 1, 1024))
        engine, previews = TextToImage.from_pretrained(*source), []

        def watch(info) -> None:
            bar.update()
            if trace is not None:
                previews.append(info.data[chosen].clone())

        warnings.simplefilter("ignore")
        warnings.simplefilter("always", EngineWarning)
        warnings.showwarning = lambda message, *_: (bar.clear(), _say("warning", str(message)))
        bar.reset()  # the time that is left is told from the steps alone
        bar.set_description_str(request.prompts[0][:24])
        result = engine.draw(request, callback=watch)
    images = [result.images[i] for i in chosen]
    contents = {path: png(image) for path, image in zip(paths, images)}
    if trace is not None:
        contents[trace] = gif([_row(engine.decode(data)) for data in previews] + [_row(images)])
    write_files(contents)
    stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in result.seconds.items())
    _say("drawn", f"{len(request.seeds)} × {request.num_inference_steps} steps on {engine.device}: {stages}")
    if record is not None:
        _compare(images[0], like, record, engine)
    for path in contents:
        print(path)


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


def _compare(image, like: Path, record: dict, engine) -> None:
    """Say whether the picture came out the same, to the last bit."""
    import torch
    from PIL import Image

    with Image.open(like) as original:
        same = original.mode == image.mode and original.size == image.size and original.tobytes() == image.tobytes()
    if same:
        _say("same", f"every pixel as in {like}")
        return
    then = f"torch {record.get('torch')} on {record.get('device')} in {record.get('dtype')}"
    now = f"torch {torch.__version__} on {engine.device} in {engine.dtype}"
    _say(
        "warning",
        f"not every pixel is as in {like}, drawn with {then}; this is {now}, or another machine, or it was edited",
    )


@commands.command()
def show(picture: Annotated[Path, typer.Argument(help="A PNG that diffusion-engine wrote.")]) -> None:
    """Print what made a picture."""
    record = read_record(picture)
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
        "size": f"{request.width}×{request.height}",
        "latents": "handed in by a program" if request.given_latents else "",
        "model": record.get("model"),
        "made with": f"diffusion-engine {record.get('engine')}, torch {record.get('torch')}, {record.get('device')}, "
        f"{record.get('dtype')}, {record.get('threads')} threads",
        "again": ""
        if request.given_latents
        else f"diffusion-engine generate --like {shlex.quote(str(picture))} -o again.png",
    }
    _table({name: value for name, value in rows.items() if value != ""})


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


def _parameters(header: dict) -> int:
    return sum(math.prod(entry["shape"]) for entry in header.values())


def _table(rows: dict) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
