"""Grade a learner's notebook: its own cells and the chapter's checks, in a clean process without the chapter's module."""

import ast
import faulthandler
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

from course.exercise import NOT_DONE, UNDONE, blank
from course.files import read_notebook
from course.run import kernel_environment
from course.source import HEADING, Chapter
from course.tasks import Judged, Sheet, Task, definitions, steps
from course.trial import Code, Result, Trial, mend

DONE, WRONG, OPEN, BLOCKED, UNSEEN = "✓", "✗", "not done", "blocked by", "not reached"
RERUNS = 30  # steps that never came back, at most
MAGIC = ("%", "!")


@dataclass
class Verdict:
    """What became of one task: its status, the first useful line about it, and how far off it was."""

    task: Task
    status: str = UNSEEN
    line: str = ""
    off: str = ""
    where: str = ""

    @property
    def text(self) -> str:
        """The status as it is printed."""
        return f"{BLOCKED} {self.where}" if self.status == BLOCKED else self.status


@dataclass
class Program:
    """What is run: the learner's cells with the chapter's checks, each definition that does not parse set aside.

    ``broken`` is qualified name → what is wrong with it: it does not parse, or never came back.
    """

    cells: list[Code]
    checks: frozenset[str]
    broken: dict[str, str] = field(default_factory=dict)

    def retire(self, name: str, reason: str) -> None:
        """Put a stub in the place of a function that never came back."""
        self.broken[name] = reason
        for number, cell in enumerate(self.cells):
            if name in definitions(ast.parse(cell.text)):
                self.cells[number] = Code(cell.id, blank(cell.text, {name: reason}))

    def undone(self, sheet: Sheet) -> set[str]:
        """Tasks that nobody began: no such function, or nothing in it."""
        found = {}
        for cell in self.cells:
            found |= definitions(ast.parse(cell.text))
        return {t.name for t in sheet.tasks if t.name not in self.broken and _empty(found.get(t.name))}


def _empty(node: ast.AST | None) -> bool:
    """Whether a body is missing, ``pass``, ``…`` or the exercise's own raise."""
    if node is None:
        return True
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    text = "\n".join(ast.unparse(statement) for statement in body)
    return text in ("", "pass", "...") or len(body) == 1 and isinstance(body[0], ast.Raise) and bool(UNDONE.search(text))


def assemble(chapter: Chapter, cells: list[Code]) -> Program:
    """The learner's code cells, with the chapter's own text in every check, and the cells that were deleted put back.

    Args:
        chapter: the chapter.
        cells: the notebook's code cells; cells that the chapter does not know stay where they are.
    """
    source = [cell for cell in chapter.code if "solution" not in cell.tags]
    checks = {cell.id: cell.text for cell in source if "check" in cell.tags}
    program = [Code(cell.id, checks.get(cell.id, cell.text)) for cell in _unique(cells)]
    for before, cell in zip([None, *source], source):
        places = {code.id: place for place, code in enumerate(program)}
        if cell.id not in places and "export" not in cell.tags:
            program.insert(places.get(before.id, len(program) - 1) + 1 if before else 0, Code(cell.id, cell.text))
    broken, mended = {}, []
    for code in program:
        text, found = mend(_python(code.text))
        mended.append(Code(code.id, text))
        broken |= {name or code.id: error for name, error in found.items()}
    return Program(mended, frozenset(checks), broken)


def _unique(cells: list[Code]) -> list[Code]:
    """Cells with ids that differ: a copy gets another."""
    seen: set[str] = set()
    found = []
    for number, cell in enumerate(cells):
        found.append(Code(f"{cell.id}-copy-{number}" if cell.id in seen else cell.id, cell.text))
        seen.add(cell.id)
    return found


def _python(text: str) -> str:
    """A cell without the lines that only a notebook understands."""
    return "\n".join("" if line.startswith(MAGIC) else line for line in text.split("\n"))


def learner_cells(path: Path) -> list[Code]:
    """The code cells of a notebook."""
    cells = (read_notebook(path) or {"cells": []})["cells"]
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
        command = [sys.executable, "-c", "from course.grade import work; work()", scratch]
        done = subprocess.run(
            command,
            cwd=chapter.root,
            env=kernel_environment(chapter.root, scratch),
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        events = Path(scratch, "events.jsonl")
        lines = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()] if events.exists() else []
        hung = Path(scratch, "hung.txt")
        dump = hung.read_text(encoding="utf-8", errors="replace") if hung.exists() else ""
    if not lines and done.returncode:
        raise RuntimeError(done.stderr.decode(errors="replace"))
    results = [Result(**{**line, "cause": line["cause"] and tuple(line["cause"])}) for line in lines if "state" in line]
    finished = bool(lines) and lines[-1] == {"end": True}
    last = None if finished else tuple(lines[-1]["begin"])
    return results, last, dump, done.returncode


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


def work() -> None:
    """In the clean process: run the plan in the folder named by the last argument, tell every event in a file."""
    folder = Path(sys.argv[-1])
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    with (folder / "events.jsonl").open("w", encoding="utf-8") as events, (folder / "hung.txt").open("w") as hung:

        def tell(entry: dict) -> None:
            events.write(json.dumps(entry) + "\n")
            events.flush()

        def begin(cell: str, index: int, limited: bool) -> None:
            faulthandler.cancel_dump_traceback_later()
            if limited:
                faulthandler.dump_traceback_later(plan["limit"], exit=True, file=hung)
            tell({"begin": [cell, index]})

        trial = Trial(plan["module"], {(cell, index): why for cell, index, why in plan["dead"]}, begin)
        for cell, text in plan["cells"]:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                results = trial.run(Code(cell, text))
            faulthandler.cancel_dump_traceback_later()
            for result in results:
                tell(result.as_dict())
        tell({"end": True})
    os._exit(0)


def judge(sheet: Sheet, program: Program, results: list[Result], headings: Mapping[str, str]) -> list[Verdict]:
    """Turn what became of every step into what became of every task.

    A failed step speaks about the tasks that it names. If one that it needs is already known to be undone or wrong, the
    others are blocked by it. Else those are wrong that no earlier check has seen right; if there are none, all.
    """
    verdicts = {task.name: Verdict(task) for task in sheet.tasks}
    court = Court(sheet, program, verdicts, headings)
    table = sheet.judged([cell.text for cell in program.cells])
    judged = {(cell.id, k): j for cell, row in zip(program.cells, table) for k, j in enumerate(row)}
    made = {(cell.id, k): step for cell in program.cells for k, step in enumerate(steps(cell.text))}
    for result in results:
        key = result.cell, result.index
        court.hear(result, judged[key], made[key].stores, result.cell in program.checks and made[key].judges)
    return [court.close(verdict) for verdict in verdicts.values()]


class Court:
    """Weighs the steps of one run, in order."""

    def __init__(self, sheet: Sheet, program: Program, verdicts: dict[str, Verdict], headings: Mapping[str, str]):
        self.sheet, self.verdicts, self.headings = sheet, verdicts, headings
        self.names = {task.number: task.name for task in sheet.tasks}
        self.proven: set[str] = set()
        self.blocked: dict[str, list[str]] = {}
        self.blame: dict[tuple[str, int], list[str]] = {}
        self.broken = program.broken
        for name in program.undone(sheet):
            verdicts[name].status = OPEN
        for name, verdict in verdicts.items():
            if name in program.broken:
                verdict.status, verdict.line = WRONG, program.broken[name]
                if verdict.line.startswith("line "):
                    verdict.line = f"syntax error, {verdict.line}"

    def red(self, names: set[str] | frozenset[str]) -> list[str]:
        """Those of the tasks that are undone or wrong, in order."""
        return [name for name, v in self.verdicts.items() if name in names and v.status in (OPEN, WRONG)]

    def hear(self, result: Result, judged: Judged, stores: frozenset[str], judges: bool) -> None:
        """One step."""
        if result.state == "ok":
            self.proven |= judged.tasks if judges else set()
            return
        if result.state == "failed":
            self.blame[result.cell, result.index] = self._culprits(result, judged, stores)
        culprits = self.blame.get(result.cause, [])
        if judges or result.state == "failed":
            for name in judged.tasks - set(culprits):
                self.blocked.setdefault(name, []).extend(culprits or [result.cause[0]])

    def _culprits(self, result: Result, judged: Judged, stores: frozenset[str]) -> list[str]:
        """Whom a failed step accuses; the first accusation of a task is the one that is told."""
        if found := UNDONE.search(result.message) if result.kind == "NotImplementedError" else None:
            name = self.names.get(found[1], "")
            if name and self.verdicts[name].status not in (OPEN, WRONG):
                self.verdicts[name].status = OPEN
            return [name] if name else []
        aside = [name for name in result.stack if name in self.broken]
        if aside:
            return [name for name in aside[:1] if name in self.verdicts]
        red = self.red(judged.needs | judged.tasks)
        if red:
            return red
        running = [name for name in result.stack if name in self.verdicts]
        if running and result.kind != "AssertionError":
            accused = [name for name in running if name not in self.proven][:1] or running[-1:]
        else:
            named = judged.tasks or {n for n in self.verdicts if n.split(".")[0] in stores}
            accused = sorted(named - self.proven or named)
        for name in accused:
            verdict = self.verdicts[name]
            verdict.status, verdict.off = WRONG, result.off
            verdict.line, verdict.where = describe(result), self.headings.get(result.cell, "")
        return accused

    def close(self, verdict: Verdict) -> Verdict:
        """The last word on a task that nothing speaks against."""
        name = verdict.task.name
        if verdict.status in (OPEN, WRONG):
            return verdict
        order = list(self.verdicts)
        by = [b for b in self.blocked.get(name, []) if b != name]
        earlier = [b for b in by if b not in order or order.index(b) < order.index(name)]
        if name in self.proven and not earlier:
            verdict.status = DONE
        elif by:
            first = (earlier or by)[0]
            verdict.status = BLOCKED
            verdict.where = self.sheet.number.get(first) or f"an error in “{self.headings.get(first, first)}”"
        return verdict


def describe(result: Result) -> str:
    """The first useful line of a failure."""
    if result.kind == "AssertionError":
        return result.message or result.line
    error = f"{result.kind}: {result.message}" if result.message else result.kind
    place = f" (in {result.stack[0]}: {result.line})" if result.stack else f" ({result.line})" if result.line else ""
    return error + place


def section_names(chapter: Chapter, language: str) -> dict[str, str]:
    """Cell id → the heading under which the reader finds it."""
    heading, found = "", {}
    for cell in chapter.reading(language):
        if cell.kind == "code":
            found[cell.id] = heading
        elif headings := HEADING.findall(cell.text):
            heading = headings[-1]
    return found


def grade(chapter: Chapter, cells: list[Code], language: str, limit: float = 60.0) -> list[Verdict]:
    """Grade a notebook.

    Args:
        chapter: the chapter.
        cells: the notebook's code cells.
        language: whose headings are named.
        limit: seconds that one statement may take.

    Returns:
        A verdict a task, in order; all done when every status is ✓.
    """
    program, sheet = assemble(chapter, cells), Sheet(chapter)
    results = run_program(chapter, program, limit)
    return judge(sheet, program, results, section_names(chapter, language))
