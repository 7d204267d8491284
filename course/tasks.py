"""A chapter's tasks (04.1, 04.2 …: what a learner writes) and which of its checks judge them, read from the text."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from course.source import Chapter
from course.statements import Definition, Step, changes, definitions, handed, mutated, parts, step_of, steps

CALLED = ("forward", "__call__", "__init__")  # methods that run without being named


@dataclass(frozen=True)
class Task:
    """One function or method to write: ``04.13``, ``Heads.split``."""

    number: str
    name: str

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


def spans(numbers: list[str]) -> str:
    """Task numbers in order, runs of three and more as a span: ``04.1, 04.3–04.6``."""
    runs: list[list[str]] = []
    for number in numbers:
        follows = runs and int(number.split(".")[1]) == int(runs[-1][-1].split(".")[1]) + 1
        runs = [*runs[:-1], [*runs[-1], number]] if follows else [*runs, [number]]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _chosen(known: dict[str, Definition]) -> list[str]:
    """What a learner writes: public functions and methods, ``forward`` and ``__call__``.

    ``__init__`` is given, because it names the parts that weights and checks refer to; it is a task only in a class
    that has no other. Names with a leading underscore, data (named tuples, dataclasses) and what only refuses bad
    input are given.
    """
    chosen = []
    for name, node in known.items():
        owner, _, method = name.rpartition(".")
        if isinstance(node, ast.ClassDef) or owner.startswith("_"):
            continue
        written = (not method.startswith("_") or method == "__call__") and not _refuses(node)
        siblings = [n.rpartition(".")[2] for n in known if owner and n.startswith(f"{owner}.")]
        alone = method == "__init__" and all(n.startswith("_") and n != "__call__" for n in siblings)
        chosen += [name] if written or alone else []
    return chosen


def _refuses(node: ast.FunctionDef) -> bool:
    """Whether a function only raises: it returns nothing and calls nothing for its effect."""
    inside = list(ast.walk(node))
    calls = [n for n in inside if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    return (
        any(isinstance(n, ast.Raise) for n in inside)
        and not calls
        and not any(isinstance(n, ast.Return | ast.Yield) and n.value for n in inside)
    )


@dataclass
class Reach:
    """Names of the chapter's module, and attributes, that a value came by."""

    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)

    def add(self, other: "Reach") -> None:
        """Join another value's."""
        self.names |= other.names
        self.attributes |= other.attributes


@dataclass(frozen=True)
class Judged:
    """What one step tells about: tasks that it ``named``, all ``tasks`` that it judges, and all that these ``needs``."""

    named: frozenset[str]
    tasks: frozenset[str]
    needs: frozenset[str]


class Sheet:
    """A chapter's tasks and the names through which its cells reach them.

    A public function that no check needs cannot be graded and is given.
    """

    def __init__(self, chapter: Chapter):
        texts = [cell.text for cell in chapter.code if "export" in cell.tags]
        self.module = {name: step for text in texts for step in steps(text) for name in step.stores}
        self.known = {name: node for text in texts for name, node in definitions(ast.parse(text)).items()}
        self.checks = [cell for cell in chapter.code if "check" in cell.tags]
        self.cells = [cell for cell in chapter.code if "solution" not in cell.tags]
        self._names = frozenset(_chosen(self.known))
        functions = {name: node for name, node in self.known.items() if isinstance(node, ast.FunctionDef)}
        self._read: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
        self._mutated = {name: mutated(node) for name, node in functions.items()}
        rows = dict(zip((cell.id for cell in self.cells), self._walk([cell.text for cell in self.cells])))
        pairs = [p for cell in self.checks for step, p in zip(steps(cell.text), rows[cell.id]) if step.judges]
        needed = set().union(*(needs for _, needs in pairs))
        self._orphans = needed - set().union(*(named for named, _ in pairs))  # every check that needs them judges them
        chosen = [name for name in _chosen(self.known) if name in needed]
        self.tasks = [Task(f"{chapter.number}.{n}", name) for n, name in enumerate(chosen, 1)]
        self.number = {task.name: task.number for task in self.tasks}

    def judged(self, texts: Iterable[str]) -> list[list[Judged]]:
        """For every cell of a program, for every step of it, the tasks that it judges and needs.

        An assertion whose names lead to no task speaks for its cell: a callback filled what it compares.
        """
        table = []
        for text, row in zip(texts := list(texts), self._walk(texts)):
            whole = set().union(*(named for step, (named, _) in zip(steps(text), row) if step.judges))
            row = [(named or whole if step.judges else named, needs) for step, (named, needs) in zip(steps(text), row)]
            table.append([Judged(frozenset(n), frozenset(n | m & self._orphans), frozenset(n | m)) for n, m in row])
        return table

    def by_check(self) -> dict[str, list[Task]]:
        """Check cell id → the tasks that it judges, in order."""
        found = {}
        for cell, row in zip(self.cells, self.judged([cell.text for cell in self.cells])):
            if "check" in cell.tags:
                names = {name for step, j in zip(steps(cell.text), row) if step.judges for name in j.tasks}
                found[cell.id] = [task for task in self.tasks if task.name in names]
        return found

    def _walk(self, texts: Iterable[str]) -> list[list[tuple[set[str], set[str]]]]:
        """Follow values through a program: per cell and step the tasks named and the tasks needed."""
        values: dict[str, Reach] = {}
        rows = []
        for text in texts:
            rows.append([])
            for step in steps(text):
                leaves = self._flow(step.node, values)
                refuses = any(isinstance(node, ast.Try) for node in ast.walk(step.node))
                telling = [r for leaf, r in leaves if leaf.judges or refuses or not step.judges]
                named = [self._tasks(reach, through=False) for reach in telling]
                needs = [self._tasks(reach, through=True) for _, reach in leaves]
                rows[-1].append((set().union(*named), set().union(*needs)))
        return rows

    def _flow(self, node: ast.stmt, values: dict[str, Reach], tries: bool = False) -> list[tuple[Step, Reach]]:
        """The simple statements in a statement with what each reads; ``values`` follows what they store.

        What a ``try`` calls is meant to fail and changes nothing.
        """
        tries |= isinstance(node, ast.Try)
        if inner := parts(node):
            together = isinstance(node, ast.Assign)  # a, b = b, a: all is read before anything is stored
            leaves = [leaf for part in inner for leaf in self._flow(part, dict(values) if together else values, tries)]
            values |= {name: here for step, here in leaves for name in step.stores} if together else {}
            changed = changes(node) | (handed(node, self._mutated) if together else frozenset())
        else:
            step, here = step_of(node), Reach()
            for reach in (values.get(name, Reach()) for name in step.now | step.later):
                here.add(reach)
            here.attributes |= step.attributes
            for name in step.stores:
                values[name] = Reach({name}) if self._defines(step, name) else here
            leaves, changed = [(step, here)], step.changes | handed(node, self._mutated)
        for name in set() if tries else changed & values.keys() - self.module.keys():
            values[name] = Reach(set(values[name].names), set(values[name].attributes))
            for _, reach in leaves:
                values[name].add(reach)
        return leaves

    def _defines(self, step: Step, name: str) -> bool:
        """Whether a step makes a name of the module, and not a variable that happens to be called alike."""
        return name in self.module and type(step.node) is type(self.module[name].node)

    def _tasks(self, start: Reach, through: bool) -> set[str]:
        """Tasks reached by names: not beyond the first task, or through everything that runs."""
        found: set[str] = set()
        seen, attributes, queue = set(), set(start.attributes), set(start.names)
        while queue - seen:
            for name in queue - seen:
                seen.add(name)
                node = self.known.get(name)
                if name in self._names:
                    found.add(name)
                    returns = node.returns and {n.id for n in ast.walk(node.returns) if isinstance(n, ast.Name)}
                    queue |= (returns or set()) & set(self.module)
                if isinstance(node, ast.ClassDef):
                    queue |= {n.id for base in node.bases for n in ast.walk(base) if isinstance(n, ast.Name)}
                elif name not in self._names or through:
                    self._open(name, queue, attributes)
            for owner in [name for name in seen if isinstance(self.known.get(name), ast.ClassDef)]:
                for name in self.known:
                    method = name.removeprefix(f"{owner}.")
                    runs = method in CALLED or method in attributes or (method.startswith("__") and through)
                    if method != name and runs and (through or name in self._names):
                        queue.add(name)
            queue &= set(self.module) | set(self.known)
        return found

    def _open(self, name: str, queue: set[str], attributes: set[str]) -> None:
        """Add what a definition's own code reads."""
        if name not in self._read:
            self._read[name] = self._reads(name)
        names, more = self._read[name]
        queue |= names
        attributes |= more

    def _reads(self, name: str) -> tuple[frozenset[str], frozenset[str]]:
        """Names and attributes in a definition; ``super().forward`` is the bases' method."""
        if name in self.module:
            step = self.module[name]
            return step.now | step.later, step.attributes
        inside = list(ast.walk(self.known[name]))
        names = {n.id for n in inside if isinstance(n, ast.Name)}
        attributes = {n.attr for n in inside if isinstance(n, ast.Attribute)}
        if "super" in names:
            owner = self.known[name.split(".")[0]]
            names |= {f"{b.id}.{a}" for b in owner.bases if isinstance(b, ast.Name) for a in attributes}
        return frozenset(names), frozenset(attributes)
