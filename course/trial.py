"""Run a notebook's cells statement by statement, so that one failure hides nothing that does not depend on it."""

import ast
import importlib.abc
import linecache
import re
import sys
import textwrap
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from course.measure import measure
from course.statements import steps

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c4944415408d763f8ffff3f0005fe02fe0def46b80000000049454e44ae426082"
)
CLAUSE = re.compile(r"(else|elif|except|finally)\b")


@dataclass(frozen=True)
class Code:
    """A code cell: whose id names it in tracebacks."""

    id: str
    text: str


@dataclass
class Result:
    """What became of one step: ``ok``, ``failed``, or ``skipped`` because of what an earlier one left undefined.

    ``stack`` holds the qualified names of the notebook's functions that were running, innermost first; ``cause`` is
    the step (cell id, index) whose failure is the reason, for a failed step its own.
    """

    cell: str
    index: int
    state: str = "ok"
    kind: str = ""
    message: str = ""
    line: str = ""
    off: str = ""
    stack: list[str] = field(default_factory=list)
    cause: tuple[str, int] | None = None

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)


class Hidden(importlib.abc.MetaPathFinder):
    """Makes one module unimportable: it is what the learner writes."""

    def __init__(self, module: str):
        self.module = module

    def find_spec(self, name: str, path=None, target=None) -> None:
        if name == self.module or name.startswith(f"{self.module}."):
            raise ModuleNotFoundError(f"{name} is what this exercise builds: use your own definitions", name=name)


def hide(module: str) -> None:
    """Forget the module, and whatever of our packages was imported before, and refuse to import it again."""
    package = module.split(".")[0]
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
    sys.meta_path.insert(0, Hidden(module))


def mend(text: str) -> tuple[str, dict[str, str]]:
    """A cell that parses: definitions with a syntax error become stubs that raise, line numbers stay.

    Returns:
        The text, and qualified name (``""`` for other code) → what is wrong.
    """
    error = _error(text)
    if not error:
        return text, {}
    pieces, broken = _pieces(text), {}
    for number, piece in enumerate(pieces):
        if _error(piece):
            pieces[number], found = _mended(piece, 1 + sum(p.count("\n") + 1 for p in pieces[:number]))
            broken |= found
    whole = "\n".join(pieces)
    if remains := _error(whole):
        return "\n" * text.count("\n"), {"": remains}
    return whole, broken


def _error(text: str, first: int = 1) -> str:
    """The syntax error of a piece of code, or nothing."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        return f"line {(error.lineno or 1) + first - 1}: {error.msg}"
    return ""


def _pieces(text: str, indent: str = "") -> list[str]:
    """Lines of text grouped by statements, in a class by methods; decorators stay with what they decorate."""
    start = re.compile(r"@|def |async def " if indent else r"[@\w]")
    pieces: list[list[str]] = [[]]
    for line in text.split("\n"):
        body = line.removeprefix(indent)
        starts = line.startswith(indent) and start.match(body) and not CLAUSE.match(body)
        decorated = pieces[-1] and pieces[-1][-1].removeprefix(indent).startswith("@")
        if starts and not decorated:
            pieces.append([])
        pieces[-1].append(line)
    return ["\n".join(piece) for piece in pieces if piece]


def _mended(piece: str, first: int, owner: str = "") -> tuple[str, dict[str, str]]:
    """A broken statement replaced by a stub of the same length; in a class, only its broken methods."""
    found = re.search(r"^( *)(?:async )?(def|class) +(\w+)", piece, re.MULTILINE)
    error = _error(textwrap.dedent(piece), first)
    if not found:
        return "\n" * piece.count("\n"), {"": error}
    indent, kind, name = found.groups()
    if kind == "class" and not owner:
        parts, broken = _pieces(piece, "    "), {}
        for number, part in enumerate(parts[1:], 1):
            if _error(textwrap.dedent(part)):
                begin = first + sum(p.count("\n") + 1 for p in parts[:number])
                parts[number], more = _mended(part, begin, name)
                broken |= more
        whole = "\n".join(parts)
        if not _error(whole):
            return whole, broken
    qualified = f"{owner}.{name}" if owner else name
    before = piece[: found.start()]  # decorators
    stub = f"{before}{indent}def {name}(*args, **kwargs): raise SyntaxError({f'{qualified}, {error}'!r})"
    return stub + "\n" * (piece.count("\n") - before.count("\n")), {qualified: error}


class Trial:
    """A namespace in which cells run one after another; picklable nowhere, but it can be forked between two cells.

    Args:
        module: dotted name of the module that must not be imported.
        dead: (cell id, step) → message for steps that are not run, because they never came back.
        report: called with cell id and number of a step about to run, and whether its time is limited (an import's
            is not: the first import of a library may take long).
    """

    def __init__(
        self,
        module: str,
        dead: Mapping[tuple[str, int], str] | None = None,
        report: Callable[[str, int, bool], None] = lambda cell, index, limited: None,
    ):
        hide(module)
        self.dead, self.report = dead or {}, report
        self.main = types.ModuleType("__main__")
        self.main.__dict__.update(display=lambda *_, **__: None, get_ipython=lambda: None)
        sys.modules["__main__"] = self.main
        self.names = self.main.__dict__
        self.poison: dict[str, tuple[str, int]] = {}
        self.reads: dict[str, frozenset[str]] = {}
        self.cells: dict[str, str] = {}

    def run(self, cell: Code) -> list[Result]:
        """Run one cell (that parses, see `mend`); returns a result a step."""
        if "course.figures" in cell.text or "course.sliders" in cell.text:
            quiet_pictures()
        self.cells[cell.id] = cell.text
        linecache.cache[cell.id] = (len(cell.text), None, cell.text.splitlines(keepends=True), cell.id)
        return [self._step(cell, index, step) for index, step in enumerate(steps(cell.text))]

    def _step(self, cell: Code, index: int, step) -> Result:
        """Run one step, or skip it where a name that it reads is not what it should be."""
        result = Result(cell.id, index)
        result.cause = self._poisoned(step.now)
        if result.cause is None and (cell.id, index) in self.dead:
            result.state, result.kind, result.message = "failed", "TimeoutError", self.dead[cell.id, index]
        elif result.cause is None:
            self.report(cell.id, index, not isinstance(step.node, ast.Import | ast.ImportFrom))
            try:
                exec(compile(ast.Module([step.node], []), cell.id, "exec"), self.names)
            except BaseException as error:  # whatever a learner's code raises, SystemExit too, is a result
                self._tell(result, error)
        else:
            result.state = "skipped"
        if result.state == "failed":
            result.cause = (cell.id, index)
        for name in step.stores:
            self.poison.pop(name, None)
            self.reads[name] = step.later
            if result.cause:
                self.poison[name] = result.cause
        for name in step.changes if result.cause else ():  # what it would have changed is not what it should be
            self.poison.setdefault(name, result.cause)
        return result

    def _poisoned(self, names: frozenset[str]) -> tuple[str, int] | None:
        """The failure behind one of the names, or behind what functions of that name read."""
        seen, queue = set(), set(names)
        while queue:
            name = queue.pop()
            if name in self.poison:
                return self.poison[name]
            seen.add(name)
            queue |= self.reads.get(name, frozenset()) - seen
        return None

    def _tell(self, result: Result, error: BaseException) -> None:
        """Describe an exception: where in the notebook, and by how much a comparison missed."""
        frames = [f for f in traceback.walk_tb(error.__traceback__) if f[0].f_code.co_filename in self.cells]
        result.state, result.kind = "failed", type(error).__name__
        result.message = (str(error).strip().splitlines() or [""])[0]
        result.stack = [frame.f_code.co_qualname.split(".<locals>")[0] for frame, _ in reversed(frames)]
        result.stack = [name for name in result.stack if not name.startswith("<")]
        if frames:
            frame, line = frames[-1]
            result.line = linecache.getline(frame.f_code.co_filename, line).strip()
            if isinstance(error, AssertionError):
                result.line, result.off = measure(self.cells[frame.f_code.co_filename], line, frame)
                result.line = result.line or linecache.getline(frame.f_code.co_filename, line).strip()


def quiet_pictures() -> None:
    """Draw without a screen, and do not encode: the pictures are not looked at."""
    import matplotlib

    matplotlib.use("agg")
    from course import figures, sliders

    figures.png, figures.cut_texts = (lambda fig, *args, **kwargs: PIXEL), (lambda fig: [])
    sliders.slider = _first_frame


def _first_frame(draw: Callable, values: Sequence, *, start: int = 0, **_) -> None:
    """A slider of which one frame is drawn."""
    import matplotlib.pyplot as plt

    draw(list(values)[start])
    plt.close("all")
