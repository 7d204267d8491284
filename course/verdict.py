"""From what became of every statement to what became of every task."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.markup import escape

from course.exercise import UNDONE
from course.program import Program
from course.statements import Definition, steps
from course.tasks import Judged, Sheet, Task, spans
from course.trial import Result

DONE, WRONG, OPEN, BLOCKED, UNSEEN = "✓", "✗", "not done", "blocked by", "not reached"
COLOURS = {DONE: "green", WRONG: "bold red", OPEN: "yellow", BLOCKED: "dim", UNSEEN: "dim"}
WORDS = {
    "en": {
        "where": "in “{}”",
        "others": "or the fault is in {}",
        "same": "the same check as {}",
        "error": "an error in “{}”: {}",
        "count": "{} of {} tasks done",
    },
    "zh": {
        OPEN: "未完成",
        BLOCKED: "要等",
        UNSEEN: "没有运行到",
        "where": "在“{}”一节",
        "others": "也可能错在 {}",
        "same": "和 {} 是同一项检查",
        "error": "“{}”一节的错误：{}",
        "count": "完成 {} 题，共 {} 题",
    },
}


@dataclass
class Verdict:
    """What became of one task: its status, the first useful line about it, and how far off it was.

    ``others`` are the tasks that may be to blame instead.
    """

    task: Task
    status: str = UNSEEN
    line: str = ""
    off: str = ""
    where: str = ""
    others: list[str] = field(default_factory=list)
    error: str = ""

    def text(self, language: str = "en") -> str:
        """The status as it is printed."""
        words = WORDS[language]
        status = words.get(self.status, self.status)
        where = words["error"].format(self.where, self.error) if self.error else self.where
        return f"{status} {where}" if self.status == BLOCKED else status


@dataclass
class Grade:
    """The verdicts, in order, and what failed without naming a task."""

    verdicts: list[Verdict]
    notes: list[str]

    @property
    def done(self) -> bool:
        """Whether every task is right and no check failed."""
        return not self.notes and all(verdict.status == DONE for verdict in self.verdicts)

    def lines(self, language: str = "en") -> list[str]:
        """The table, with rich's markup: number, name, status, and under a failure its first line and how far off.

        What one failed check says of several tasks is said once.
        """
        words, said = WORDS[language], {}
        width = max(len(v.task.name) for v in self.verdicts)
        first = max(len(v.task.number) for v in self.verdicts)
        lines = []
        for v in self.verdicts:
            status = f"[{COLOURS[v.status]}]{escape(v.text(language))}[/]"
            lines.append(f"{v.task.number:{first}}  {v.task.name:{width}}  {status}")
            if v.status == WRONG:
                before = said.setdefault((v.line, v.off, v.where), v.task.number)
                shown = [v.line, v.off, words["where"].format(v.where) if v.where else ""]
                shown.append(words["others"].format(spans(v.others)) if v.others else "")
                shown = shown if before == v.task.number else [words["same"].format(before)]
                lines += [f"{'':{first}}    {escape(text)}" for text in filter(None, shown)]
        lines += [f"[red]✗[/] {escape(note)}" for note in self.notes]
        done = sum(v.status == DONE for v in self.verdicts)
        return [*lines, words["count"].format(done, len(self.verdicts))]


def judge(sheet: Sheet, program: Program, results: list[Result], headings: Mapping[str, str]) -> Grade:
    """Turn what became of every step into what became of every task.

    A failed step speaks about the tasks that it names. If one that it needs is already known to be undone or wrong, the
    others are blocked by it. Else it accuses those that no earlier check has seen right, and of the others the latest,
    and tells who may be to blame instead.
    """
    verdicts = {task.name: Verdict(task) for task in sheet.tasks}
    court = Court(sheet, program, verdicts, headings)
    table = sheet.judged([cell.text for cell in program.cells])
    judged = {(cell.id, k): j for cell, row in zip(program.cells, table) for k, j in enumerate(row)}
    made = {(cell.id, k): step for cell in program.cells for k, step in enumerate(steps(cell.text))}
    for result in results:
        key = result.cell, result.index
        made_here = made[key].stores if isinstance(made[key].node, Definition) else frozenset()
        court.hear(result, judged[key], made_here, result.cell in program.checks and made[key].judges)
    return Grade([court.close(verdict) for verdict in verdicts.values()], court.notes)


class Court:
    """Weighs the steps of one run, in order."""

    def __init__(self, sheet: Sheet, program: Program, verdicts: dict[str, Verdict], headings: Mapping[str, str]):
        self.sheet, self.verdicts, self.headings = sheet, verdicts, headings
        self.names = {task.number: task.name for task in sheet.tasks}
        self.proven: set[str] = set()
        self.blocked: dict[str, list[str]] = {}
        self.blame: dict[tuple[str, int], list[str]] = {}
        self.errors: dict[str, str] = {}  # cell → what failed in it without naming a task
        self.broken = program.broken
        self.notes = [f"{name}: {why}" for name, why in program.broken.items() if name not in verdicts]
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
            self.blame[result.cell, result.index] = culprits = self._culprits(result, judged, stores)
            if not culprits:
                self.errors.setdefault(result.cell, describe(result))
            if judges and not culprits:
                self.notes.append(f"a check in “{self.headings.get(result.cell, result.cell)}”: {describe(result)}")
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
        order = list(self.verdicts)
        named = judged.tasks or {name for name in order if name.split(".")[0] in stores}
        red = self.red(judged.needs | judged.tasks)
        if red:
            return red
        running = [name for name in result.stack if name in self.verdicts and result.kind != "AssertionError"]
        if running:
            accused = [name for name in running if name not in self.proven][:1] or running[-1:]
        else:
            latest = set(sorted(judged.named, key=order.index)[-1:])
            accused = sorted((named - self.proven) | latest, key=order.index) if latest or named else []
        suspects = judged.tasks | (judged.needs if named <= self.proven or running else judged.needs - self.proven)
        for verdict in [self.verdicts[name] for name in accused if self.verdicts[name].status not in (OPEN, WRONG)]:
            verdict.status, verdict.off = WRONG, result.off
            verdict.line, verdict.where = describe(result), self.headings.get(result.cell, "")
            verdict.others = [self.sheet.number[other] for other in order if other in suspects - {verdict.task.name}]
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
            verdict.where = self.sheet.number.get(first) or self.headings.get(first, first)
            verdict.error = "" if first in self.sheet.number else self.errors.get(first, "")
        return verdict


def describe(result: Result) -> str:
    """The first useful line of a failure."""
    if result.kind == "AssertionError":
        return result.message or result.line
    error = f"{result.kind}: {result.message}" if result.message else result.kind
    place = f" (in {result.stack[0]}: {result.line})" if result.stack else f" ({result.line})" if result.line else ""
    return error + place
