"""Numbers in the site's pages: ``{{quality.vae.mean_psnr_db:.1f}}`` is read from what was measured, never typed.

    {{source.path:spec}}          one value, formatted as Python formats it; [median, low, high] gives "median (low … high)"
    {{max source.a.*.b:spec}}     min, max, median or sum over every ``*``

A path is keys and places joined by dots; a key may hold dots and spaces itself (``switches.step_cache 0.1.time_ratio``).
In a list, ``family=sd3,dtype=float32`` means the entries that say so.
"""

import difflib
import json
import re
import statistics
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from course.files import CourseError
from course.source import CHAPTER_NAME

SOURCES = {
    "quality": "diffusion_engine/assets/model/quality.json",
    "training": "diffusion_engine/assets/model/training.json",
    "clip_quality": "diffusion_engine/assets/clip_model/quality.json",
    "clip_training": "diffusion_engine/assets/clip_model/training.json",
    "models": "notes/models.json",
    "bench": "notes/bench.json",
}
# Measured section by section, on some machine, after the code: the file, or some of its sections, may be absent.
LATER = {"bench": ("picture", "diffusers", "optimizations", "minivllm", "reference")}
FOLDS = {"min": min, "max": max, "median": statistics.median, "sum": sum}
PLACE = re.compile(r"\{\{ *(?:(min|max|median|sum) +)?(\w+)\.([^{}:]+?) *(?::([^{}]+))?\}\}")
MINUTES = re.compile(r"^#     minutes: (\d+)$", re.MULTILINE)
ANY = re.compile(r"\{\{.*?\}\}", re.DOTALL)


class Results:
    """The committed results of a repository, read when first asked for; ``course`` counts the repository itself."""

    def __init__(self, root: Path):
        self.root = root
        self.read: dict[str, Any] = {}

    def source(self, name: str) -> Any:
        """The content of one source; empty where nothing has been measured yet.

        Raises:
            CourseError: no such source, or its file is missing or broken.
        """
        if name == "course":
            return self.counts
        if name not in SOURCES:
            raise CourseError(f"there are no results called {name}; try one of course, {', '.join(SOURCES)}")
        path = self.root / SOURCES[name]
        if name not in self.read:
            try:
                there = path.is_file() or name not in LATER
                self.read[name] = json.loads(path.read_text(encoding="utf-8")) if there else {}
            except (OSError, ValueError) as error:
                raise CourseError(f"{SOURCES[name]} cannot be read: {error}") from error
        return self.read[name]

    @cached_property
    def counts(self) -> dict[str, Any]:
        """Chapters with their minutes, check cells, mutants, cards, notes, the engine's modules and lines, as they are now."""
        sources = [p for p in (self.root / "notebooks" / "source").glob("*.py") if CHAPTER_NAME.fullmatch(p.stem)]
        texts = [path.read_text(encoding="utf-8") for path in sources]
        mutants = [p.read_text(encoding="utf-8") for p in (self.root / "tests" / "mutants").glob("*.toml")]
        modules = [path.read_text(encoding="utf-8") for path in (self.root / "diffusion_engine").rglob("*.py")]
        built = [module for module in modules if module.startswith("# Generated from")]
        return {
            "chapters": len(texts),
            "minutes": {p.stem.split("_")[0]: int(MINUTES.search(t)[1]) for p, t in zip(sources, texts, strict=True)},
            "checks": sum(len(re.findall(r'^# %% .*tags=\[[^\]]*"check"', text, re.MULTILINE)) for text in texts),
            "mutants": sum(text.count("[[mutant]]") for text in mutants),
            "cards": len(list((self.root / "papers").glob("*.zh.md"))),
            "notes": len(list((self.root / "notes").glob("*.zh.md"))),
            "modules": len(built),
            "module_lines": sum(len(module.splitlines()) for module in built),
        }

    def look_up(self, source: str, path: str) -> list:
        """Every value that a path names: one, or with ``*`` several; none where the source is not measured yet.

        Raises:
            CourseError: a key that is not there; it names those that are like it.
        """
        data, section = self.source(source), path.partition(".")[0]
        if source in LATER and section not in LATER[source]:
            raise CourseError(f"{source} has no section {section}; try one of {', '.join(LATER[source])}")
        if source in LATER and section not in data:
            return []
        return list(_walk(data, path, f"{source}.{path}"))


def _walk(data: Any, path: str, whole: str) -> Iterator[Any]:
    """The values at a path."""
    if not path:
        yield data
        return
    head, _, rest = path.partition(".")
    if head == "*" and isinstance(data, dict | list):
        for value in data.values() if isinstance(data, dict) else data:
            yield from _walk(value, rest, whole)
        return
    if "=" in head and isinstance(data, list):
        wanted = [pair.split("=") for pair in head.split(",")]
        rows = [row for row in data if all(str(row.get(key)) == value for key, value in wanted)]
        if not rows:
            raise CourseError(f"{whole}: no entry has {head}")
        for row in rows:
            yield from _walk(row, rest, whole)
        return
    keys = {str(place): value for place, value in enumerate(data)} if isinstance(data, list) else data
    if not isinstance(keys, dict):
        raise CourseError(f"{whole} goes on after a value: {path} is one step too many")
    fitting = [key for key in keys if path == key or path.startswith(f"{key}.")]
    if not fitting:
        near = difflib.get_close_matches(head, map(str, keys), 3, 0) or list(keys)[:3]
        raise CourseError(f"{whole}: there is no {head}; try {', '.join(near)}")
    key = max(fitting, key=len)
    yield from _walk(keys[key], path[len(key) + 1 :], whole)


def shown(value: Any, spec: str) -> str:
    """A value as text; three numbers in a row are a median with the smallest and the largest, nothing is a dash."""
    if value is None:
        return "–"
    if isinstance(value, list) and len(value) == 3 and all(isinstance(number, int | float) for number in value):
        median, low, high = (format(number, spec) for number in value)
        return f"{median} ({low} … {high})"
    if isinstance(value, bool | dict | list):
        raise TypeError(f"a {type(value).__name__} is no number and no word")
    return format(value, spec).replace("|", "\\|")


def fill(text: str, results: Results, unmeasured: str, where: str) -> str:
    """A page with every ``{{…}}`` replaced by what was measured.

    Args:
        unmeasured: what stands where a measurement has not been made yet. where: the page, for errors.

    Raises:
        CourseError: an unknown key, a value that the spec does not fit, or braces that say nothing.
    """

    def one(found: re.Match) -> str:
        told = PLACE.fullmatch(found.group())
        if not told:
            raise CourseError(f"{where}: {found.group()} is not {{{{source.path:spec}}}}")
        fold, source, path, spec = told.groups()
        try:
            values = results.look_up(source, path)
            if not values:
                return unmeasured
            if not fold and len(values) > 1:
                raise CourseError(f"{source}.{path} has {len(values)} values; put {', '.join(FOLDS)} before it")
            return shown(FOLDS[fold](values) if fold else values[0], spec or "")
        except (CourseError, ValueError, TypeError) as error:
            raise CourseError(f"{where}: {found.group()}: {error}") from error

    return ANY.sub(one, text)


def places(text: str) -> list[str]:
    """What a page reads, without the way in which it is shown: twins read the same."""
    return sorted(re.sub(r" *(:[^{}]*)?\}\}$", "}}", place) for place in ANY.findall(text))
