"""A chapter with one line of it made wrong: which of its checks notices?

Each chapter runs once, in a forked process, without the cells that only draw. At the cell that a fault belongs to, a further
process is forked for it, which goes on from there with the faulty cell until a check fails: nothing before is run again.
"""

import importlib
import io
import os
import pickle
import tomllib
import traceback
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import torch

from course.fingerprint import imports, is_ours
from course.program import Program, assemble
from course.source import Chapter, chapter_paths, load_chapter
from course.statements import steps
from course.tasks import Sheet
from course.trial import Code, Result, Trial
from course.verdict import Grade, judge

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = ROOT / "tests" / "mutants"


@dataclass(frozen=True)
class Mutant:
    """A typical mistake that keeps every shape: ``right`` becomes ``wrong`` in an export cell.

    ``check`` is part of the assertion that is meant to notice, its comment included.
    """

    name: str
    right: str
    wrong: str
    check: str = ""


@dataclass(frozen=True)
class Outcome:
    """The first failure of a run (None: all green) and the grade."""

    failure: Result | None
    grade: Grade


@cache
def chapter(number: str) -> Chapter:
    """The source of one chapter."""
    return load_chapter(*chapter_paths(ROOT, [number]), ROOT)


def mutants(number: str) -> list[Mutant]:
    """The mistakes of one chapter, ``tests/mutants/NN.toml``."""
    entries = tomllib.loads((MUTANTS / f"{number}.toml").read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**entry) for entry in entries]


def forked(function: Callable, *arguments: Any) -> Any:
    """What a function returns in a forked process; it may do there whatever it likes.

    Raises:
        RuntimeError: it raised, or the process died.
    """
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.close(reader)
            torch.set_num_threads(1)
            answer = True, function(*arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(process, 0)
    fine, value = pickle.loads(data) if data else (False, "the process died")
    if not fine:
        raise RuntimeError(value)
    return value


def try_faults(source: Chapter, cells: list[Code], faults: Iterable[Mutant] = ()) -> tuple[Outcome, dict[str, Outcome]]:
    """Grade a learner's cells as they are, and once more with each fault.

    Returns:
        The outcome without a fault, run to the end, and name of the fault → its outcome, run to the first failure.
    """
    import_libraries(source)
    return forked(_try_faults, source, cells, list(faults))


@cache
def import_library(module: str, name: str | None) -> None:
    """Import a module, and what it loads when a name of it is first asked for."""
    getattr(importlib.import_module(module), name or "", None)


def import_libraries(source: Chapter) -> None:
    """Import what the chapter imports from others once, here, instead of in every forked process."""
    matplotlib.use("agg")
    for cell in source.code:
        for module, name in imports(cell.text):
            if not is_ours(module):
                import_library(module, name)


def without_plots(source: Chapter, program: Program) -> Program:
    """The program without the folded cells that only draw: nothing that they store is read later."""
    hidden = {cell.id for cell in source.code if "hide" in cell.tags and "export" not in cell.tags}
    kept, read = [], set()
    for cell in reversed(program.cells):
        parts = steps(cell.text)
        if cell.id not in hidden or read & {name for step in parts for name in step.stores}:
            kept.insert(0, cell)
            read |= {name for step in parts for name in step.now | step.later}
    return Program(kept, program.checks, program.broken)


def _try_faults(source: Chapter, cells: list[Code], faults: list[Mutant]) -> tuple[Outcome, dict[str, Outcome]]:
    """In the forked process."""
    sheet, program = Sheet(source), without_plots(source, assemble(source, cells))
    exported = {cell.id for cell in source.code if "export" in cell.tags}
    trial, results, outcomes = Trial(source.module.replace("/", ".")), [], {}
    for place, cell in enumerate(program.cells):
        for fault in [f for f in faults if cell.id in exported and f.right in cell.text]:
            faulty = Code(cell.id, cell.text.replace(fault.right, fault.wrong))
            changed = Program([*program.cells[:place], faulty, *program.cells[place + 1 :]], program.checks)
            outcomes[fault.name] = forked(_go_on, sheet, changed, trial, results, place)
        results += _quiet(trial, cell)
    return _outcome(sheet, program, results), outcomes


def _go_on(sheet: Sheet, program: Program, trial: Trial, results: list[Result], place: int) -> Outcome:
    """From one cell to the first failed check."""
    for cell in program.cells[place:]:
        results = results + _quiet(trial, cell)
        if cell.id in program.checks and any(r.state == "failed" for r in results):
            break
    return _outcome(sheet, program, results)


def _quiet(trial: Trial, cell: Code) -> list[Result]:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return trial.run(cell)


def _outcome(sheet: Sheet, program: Program, results: list[Result]) -> Outcome:
    """The grade, and the first failure."""
    failures = [result for result in results if result.state == "failed"]
    return Outcome(failures[0] if failures else None, judge(sheet, program, results, {}))


def solved(source: Chapter) -> list[Code]:
    """The chapter's own code, as a learner who has done everything."""
    return [Code(cell.id, cell.text) for cell in source.code if "solution" not in cell.tags]
