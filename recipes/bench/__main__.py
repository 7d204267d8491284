"""Measure, and write ``notes/bench.json`` and ``notes/bench.md``."""

import json
import time
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from diffusion_engine.files import write_files
from diffusion_engine.request import one_of
from recipes.bench import SECTIONS

NOTES = Path(__file__).resolve().parents[2] / "notes"


def markdown(report: dict) -> str:
    """The whole report as a document."""
    lines = [
        "# Measurements",
        "",
        "Written by `make bench`; do not edit. Medians, with the smallest and the largest in brackets; ratios are taken "
        "round by round in one run. Seconds belong to the machine named at each section, ratios travel better.",
        "",
    ]
    for name, module in SECTIONS.items():
        if name in report:
            section, found = import_module(module), report[name]
            lines += [f"## {section.TITLE}", "", machine_line(found["machine"]), "", *section.markdown(found)]
    return "\n".join(lines).rstrip() + "\n"


def machine_line(machine: dict) -> str:
    """One line that tells what the numbers were measured on."""
    return (
        f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}, {machine['date']}; "
        f"GEMM fp32 {machine['fp32_gflops']:.1f} and bf16 {machine['bf16_gflops']:.1f} GFLOP/s, "
        f"copy {machine['bandwidth_gbs']:.1f} GB/s; the section took {machine['minutes']:.1f} minutes."
    )


def main(
    sections: Annotated[list[str] | None, typer.Argument(help=f"some of {', '.join(SECTIONS)}; all by default")] = None,
    folder: Annotated[Path, typer.Option(help="where bench.json and bench.md are")] = NOTES,
) -> None:
    """Measure this machine and the engine on it; sections that are not asked for keep their numbers."""
    names = [one_of("section", name, tuple(SECTIONS)) for name in sections or SECTIONS]
    from recipes.bench.tools import Bench

    folder.mkdir(parents=True, exist_ok=True)  # now, not after minutes of measuring
    file = folder / "bench.json"
    report = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    with tqdm(names, bar_format="{desc:14}{bar} {n}/{total}, {elapsed} {postfix}", disable=None) as bar:
        bench = Bench(bar)
        for name in bar:
            bar.set_description_str(name)
            begun = time.perf_counter()
            found = import_module(SECTIONS[name]).measure(bench)
            spent = {"date": date.today().isoformat(), "minutes": round((time.perf_counter() - begun) / 60, 2)}
            report[name] = {"machine": bench.machine | spent, **found}
    ordered = {key: report[key] for key in SECTIONS if key in report}
    text = json.dumps(ordered, indent=1, ensure_ascii=False) + "\n"
    write_files({file: text.encode(), folder / "bench.md": markdown(ordered).encode()})
    for name in names:
        typer.echo("\n".join(import_module(SECTIONS[name]).markdown(report[name])))
    typer.echo(f"{file}")


if __name__ == "__main__":
    typer.run(main)
