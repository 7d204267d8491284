"""A chapter's source (``notebooks/source/NN_name.py``, py:percent) read into typed cells."""

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import jupytext
from nbformat import NotebookNode

from course.files import CourseError, digest

LANGUAGES = ("zh", "en")
PACKAGES = ("diffusion_engine", "minivllm")
TAGS = ("export", "check", "hide", "solution")
# The same filters stand in notebooks/jupytext.toml, so that a save in JupyterLab writes what these tools write.
FILTERS = {"notebook_metadata_filter": "course,kernelspec,-all", "cell_metadata_filter": "tags,lang,twin,-all"}
CHAPTER_NAME = re.compile(r"(\d\d|A\d)_[a-z0-9_]+")
PLAYGROUND = "playground"  # the one source that is no chapter: its notebooks lie beside the chapters' folders
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """One cell of the source.

    ``kind`` is ``zh`` or ``en`` for prose, ``code``, or ``other`` for what no reader sees (raw, or of no language).
    """

    kind: str
    text: str
    line: int
    tags: tuple[str, ...] = ()
    twin: str | None = None
    options: tuple[str, ...] = ()
    id: str = ""


@dataclass(frozen=True)
class Chapter:
    """One source file: its header's ``course`` entry and its cells in order."""

    root: Path
    path: Path
    meta: dict
    cells: list[Cell] = field(repr=False)
    text: str = field(repr=False)

    @property
    def number(self) -> str:
        """``03``, or ``A1`` in the appendix."""
        return self.path.stem.split("_")[0]

    @property
    def is_chapter(self) -> bool:
        """False for the playground, which builds nothing and keeps no chapter's rhythm."""
        return self.path.stem != PLAYGROUND

    @property
    def source(self) -> str:
        """The source's path from the root, with forward slashes."""
        return self.path.relative_to(self.root).as_posix()

    @property
    def module(self) -> str | None:
        """The module that the chapter builds, a path without ``.py``: ``diffusion_engine/reference/sd3``; or None."""
        name = self.meta.get("module")
        if not name:
            return None
        known = name.split("/")[0] in PACKAGES
        return name if known else f"{self.meta.get('package', PACKAGES[0])}/{name}"

    @property
    def module_path(self) -> Path | None:
        """The file that the chapter's ``export`` cells become."""
        return self.root / f"{self.module}.py" if self.module else None

    def notebook_path(self, language: str) -> Path:
        """The generated notebook of one language."""
        if not self.is_chapter:
            return self.root / "notebooks" / f"{self.path.stem}.{language}.ipynb"
        return self.root / "notebooks" / language / f"{self.path.stem}.ipynb"

    def reading(self, language: str) -> list[Cell]:
        """The cells that a reader of one language sees."""
        return [cell for cell in self.cells if cell.kind in (language, "code")]

    @property
    def code(self) -> list[Cell]:
        """The code cells in order."""
        return [cell for cell in self.cells if cell.kind == "code"]

    def slots(self) -> list[tuple[Cell, ...]]:
        """The cells with each zh cell and the en cell directly after it taken together."""
        return group_twins(self.cells)


def group_twins(cells: list[Cell]) -> list[tuple[Cell, ...]]:
    """(zh, en) pairs where an en cell directly follows a zh cell; every other cell stands alone."""
    slots: list[tuple[Cell, ...]] = []
    for cell in cells:
        if cell.kind == "en" and slots and [c.kind for c in slots[-1]] == ["zh"]:
            slots[-1] = (*slots[-1], cell)
        else:
            slots.append((cell,))
    return slots


def twin_stamp(zh: str, en: str) -> str:
    """What the en cell records of both texts when they were last seen to agree: four hex digits each."""
    return digest(zh.strip(), length=4) + digest(en.strip(), length=4)


def read_percent(text: str) -> NotebookNode:
    """The notebook that jupytext sees in a py:percent text."""
    return jupytext.reads(text, fmt="py:percent")


def write_percent(notebook: NotebookNode) -> str:
    """The py:percent text that a save in JupyterLab would write, with the course's filters."""
    notebook.metadata["jupytext"] = {**FILTERS, "text_representation": {"extension": ".py", "format_name": "percent"}}
    return jupytext.writes(notebook, fmt="py:percent")


def load_chapter(path: Path, root: Path) -> Chapter:
    """Read one source file.

    Raises:
        CourseError: the file is not readable as py:percent, or its ``# %%`` lines are not its cells.
    """
    text = path.read_text(encoding="utf-8")
    try:
        notebook = read_percent(text)
    except Exception as error:  # jupytext and YAML raise many kinds; every one of them means: not a chapter
        raise CourseError(f"{path.relative_to(root)} does not read as py:percent: {error}") from error
    lines = [number for number, line in enumerate(text.splitlines(), 1) if line.startswith("# %%")]
    if len(lines) != len(notebook.cells):
        found = f"{len(lines)} lines begin with `# %%` but jupytext sees {len(notebook.cells)} cells"
        raise CourseError(
            f"{path.relative_to(root)}: {found}; start every cell, the first too, with its own `# %%` line"
        )
    cells = [_typed(cell, line) for cell, line in zip(notebook.cells, lines, strict=True)]
    number = path.stem.split("_")[0]
    return Chapter(root, path, dict(notebook.metadata.get("course", {})), _with_ids(number, cells), text)


def _typed(cell: NotebookNode, line: int) -> Cell:
    """One jupytext cell with its kind made plain."""
    language = cell.metadata.get("lang")
    kind = "code" if cell.cell_type == "code" else language if language in LANGUAGES else "other"
    known = {"tags"} if kind == "code" else {"lang", "twin"}
    options = tuple(key for key in cell.metadata if key not in known and key != "lines_to_next_cell")
    tags, twin = tuple(cell.metadata.get("tags", ())), cell.metadata.get("twin")
    return Cell(kind, cell.source, line, tags, None if twin is None else str(twin), options)


def slug(heading: str) -> str:
    """A heading as the middle of a cell id: lower case, ASCII, at most 40 characters; ``section`` if empty."""
    words = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")
    return re.sub(r"^(\d\d|a\d)-", "", words)[:40].strip("-") or "section"


def _with_ids(number: str, cells: list[Cell]) -> list[Cell]:
    """Give each cell the id ``chapter-heading-ordinal``; twins share theirs."""
    section, ordinal, seen, named = "start", 0, Counter(), []
    for slot in group_twins(cells):
        lead = slot[-1]
        headings = [] if lead.kind == "code" else HEADING.findall(lead.text)
        opens = bool(headings) and lead.text.lstrip().startswith("#")
        if opens:
            section, ordinal = _enter(headings[0], seen), 0
        ordinal += 1
        named += [replace(cell, id=f"{number.lower()}-{section}-{ordinal:02d}") for cell in slot]
        if len(headings) > opens:
            section, ordinal = _enter(headings[-1], seen), 0
    return named


def _enter(heading: str, seen: Counter) -> str:
    """The slug of a section that begins, made unique in its chapter."""
    name = slug(heading)
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}-{seen[name]}"


def chapter_paths(root: Path, wanted: list[str] | None = None) -> list[Path]:
    """Source files in reading order (00 … 23, A1 …, the playground), all of them or those named by number or stem.

    Raises:
        CourseError: a name in ``wanted`` is no chapter.
    """
    sources = (root / "notebooks" / "source").glob("*.py")
    paths = sorted(p for p in sources if CHAPTER_NAME.fullmatch(p.stem) or p.stem == PLAYGROUND)
    if not wanted:
        return paths
    by_name = {key.lower(): p for p in paths for key in (p.stem, p.stem.split("_")[0])}
    names = [Path(name).stem.lower().zfill(2) for name in wanted]
    unknown = [name for name in names if name not in by_name]
    if unknown:
        numbers = ", ".join(p.stem.split("_")[0] for p in paths)
        raise CourseError(f"no chapter {', '.join(unknown)} in notebooks/source; there are {numbers or 'none yet'}")
    return [path for path in paths if path in {by_name[name] for name in names}]


def load_chapters(root: Path, wanted: list[str] | None = None) -> list[Chapter]:
    """Read all chapters, or the wanted ones, in reading order."""
    return [load_chapter(path, root) for path in chapter_paths(root, wanted)]
