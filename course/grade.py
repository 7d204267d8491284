"""Grade a learner's notebook: its own cells and the chapter's checks, in a clean process without the chapter's module."""

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from course.files import CourseError, read_notebook
from course.program import Program, assemble
from course.run import kernel_environment
from course.source import HEADING, Chapter
from course.statements import definitions
from course.tasks import Sheet
from course.trial import Code, Result
from course.verdict import Grade, judge

RERUNS = 30  # steps that never came back, at most


def learner_cells(path: Path) -> list[Code]:
    """The code cells of a notebook."""
    number = path.name.split("_")[0]
    advice = f"mend it, or `course exercise {number} --fresh` moves it aside and begins anew"
    cells = (read_notebook(path, advice) or {"cells": []})["cells"]
    return [Code(c.get("id", f"cell-{n}"), c["source"]) for n, c in enumerate(cells) if c["cell_type"] == "code"]


def run_program(chapter: Chapter, program: Program, limit: float) -> list[Result]:
    """Run the program in a clean process; what never comes back is set aside and the rest is run again.

    Args:
        limit: seconds that one step may take.
    """
    dead: dict[tuple[str, int], str] = {}
    for _ in range(RERUNS):
        results, last, dump, code = _attempt(chapter, program, dead, limit)
        if last is None:
            break
        running = _running(program, dump)
        reason = f"still running after {limit:g} s" if dump else f"the process died (exit status {code})"
        if dump and running and running not in program.broken:
            program.retire(running, f"{reason}: an endless loop? --timeout gives it longer")
        else:
            dead[last] = reason
    return results


def _attempt(chapter: Chapter, program: Program, dead: Mapping, limit: float):
    """One run: the results, the step that did not come back (or None), where it hung, and the exit status."""
    with tempfile.TemporaryDirectory(prefix="course-") as scratch:
        plan = {"module": chapter.module.replace("/", "."), "limit": limit, "dead": [[*k, v] for k, v in dead.items()]}
        plan["cells"] = [[cell.id, cell.text] for cell in program.cells]
        Path(scratch, "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        command = [sys.executable, "-m", "course.worker", scratch]
        said = Path(scratch, "stderr.txt")
        with said.open("wb") as stderr:
            worker = subprocess.Popen(
                command,
                cwd=chapter.root,
                env=kernel_environment(chapter.root, scratch),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                code = worker.wait()
            finally:  # with everything that the learner's cells started
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
        events, dump, complaint = (_text(Path(scratch, n)) for n in ("events.jsonl", "hung.txt", said.name))
    lines = [json.loads(line) for line in events.splitlines()]
    if not lines and code:
        raise RuntimeError(complaint)
    results = [Result(**{**line, "cause": line["cause"] and tuple(line["cause"])}) for line in lines if "state" in line]
    finished = bool(lines) and lines[-1] == {"end": True}
    last = None if finished else tuple(lines[-1]["begin"])
    return results, last, dump, code


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _running(program: Program, dump: str) -> str | None:
    """The innermost function of the notebook in a dump of ``faulthandler``."""
    texts = {cell.id: cell.text for cell in program.cells}
    for line in dump.splitlines():
        parts = line.strip().split('"')
        if len(parts) == 3 and parts[1] in texts:
            number = int(parts[2].split("line ")[1].split()[0])
            inside = definitions(ast.parse(texts[parts[1]])).items()
            names = [n for n, d in inside if isinstance(d, ast.FunctionDef) and d.lineno <= number <= d.end_lineno]
            if names:
                return names[-1]
    return None


def section_names(chapter: Chapter, language: str) -> dict[str, str]:
    """Cell id → the heading under which the reader finds it."""
    heading, found = "", {}
    for cell in chapter.reading(language):
        if cell.kind == "code":
            found[cell.id] = heading
        elif headings := HEADING.findall(cell.text):
            heading = headings[-1]
    return found


def grade(chapter: Chapter, cells: list[Code], headings: Mapping[str, str], limit: float = 60.0) -> Grade:
    """Grade a notebook.

    Args:
        chapter: the chapter.
        cells: the notebook's code cells, see `learner_cells`.
        headings: where the reader finds a cell, see `section_names`.
        limit: seconds that one statement may take.
    """
    program, sheet = assemble(chapter, cells), Sheet(chapter)
    if not sheet.tasks:
        raise CourseError(f"chapter {chapter.number} has no tasks")
    return judge(sheet, program, run_program(chapter, program, limit), headings)
