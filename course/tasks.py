"""A chapter's tasks (04.1, 04.2 …: what a learner writes) and which of its checks judge them, read from the text."""

import ast
import symtable
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from course.source import Chapter

CALLED = ("forward", "__call__", "__init__")  # methods that run without being named
Definition = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Task:
    """One function or method to write: ``04.13``, ``Heads.split``."""

    number: str
    name: str

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


@dataclass(frozen=True)
class Step:
    """One statement at the top level of a cell, the unit that runs, fails, and names tasks.

    ``now`` are the global names that it reads when it runs, ``later`` those that its functions read when called;
    ``changes`` are those whose value it may change without storing it: ``state`` in ``train_step(state)``.
    """

    node: ast.stmt
    now: frozenset[str]
    later: frozenset[str]
    stores: frozenset[str]
    attributes: frozenset[str]
    changes: frozenset[str]

    @property
    def judges(self) -> bool:
        """Whether it can turn red by itself: it asserts, or raises."""
        return any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(self.node))


@lru_cache(maxsize=2048)
def steps(text: str) -> tuple[Step, ...]:
    """The statements of a cell.

    Raises:
        SyntaxError: the cell is not Python.
    """
    return tuple(_step(node) for node in ast.parse(text).body)


def _step(node: ast.stmt) -> Step:
    """Names of one statement, by scope: a comprehension's own variables are not the cell's."""
    top = symtable.symtable(ast.unparse(node), "cell", "exec")
    now = {s.get_name() for s in top.get_symbols() if s.is_referenced()}
    stores = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    if not isinstance(node, Definition):  # x[0] = … and x.a = … change x
        written = [n for n in ast.walk(node) if isinstance(n, ast.Attribute | ast.Subscript)]
        stores |= {_root(n) for n in written if isinstance(n.ctx, ast.Store)} - {""}
    inner, waiting = set(), set()
    for table in top.get_children():
        _globals(table, waiting if isinstance(node, ast.FunctionDef) else inner, waiting)
    attributes = frozenset(n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute))
    return Step(node, frozenset(now | inner), frozenset(waiting), frozenset(stores), attributes, _changes(node))


def _changes(node: ast.stmt) -> frozenset[str]:
    """Names that calls whose result is dropped may change, the loop's source with the loop's variable.

    A loop that trains (``loss.backward()``) may change everything in it but a random generator.
    """
    inside = list(ast.walk(node))
    if any(isinstance(n, ast.Attribute) and n.attr == "backward" for n in inside):
        handed = {id(n.value) for n in inside if isinstance(n, ast.keyword)}
        return frozenset(n.id for n in inside if isinstance(n, ast.Name) and id(n) not in handed)
    if isinstance(node, ast.Try):
        return frozenset()
    dropped = [n.value for n in inside if isinstance(n, ast.Expr) and not isinstance(n.value, ast.Attribute)]
    calls = [call for value in dropped for call in ast.walk(value) if isinstance(call, ast.Call)]
    changed = {_root(part) for call in calls for part in (call.func, *call.args)} - {""}
    for loop in [n for n in inside if isinstance(n, ast.For)]:
        if changed & {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}:
            changed |= {n.id for n in ast.walk(loop.iter) if isinstance(n, ast.Name)}
    return frozenset(changed)


def _globals(table: symtable.SymbolTable, here: set[str], waiting: set[str]) -> None:
    """Global names read in a scope and the scopes in it; what a class's methods read waits for a call."""
    here |= {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
    for child in table.get_children():
        _globals(child, waiting if table.get_type() == "class" else here, waiting)


def _root(node: ast.expr) -> str:
    """``x`` of ``x.a[0].b``."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def definitions(tree: ast.Module) -> dict[str, Definition]:
    """Functions, classes and methods of a module by qualified name, in order."""
    found = {}
    for node in tree.body:
        if isinstance(node, Definition):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{m.name}": m for m in node.body if isinstance(m, ast.FunctionDef)}
    return found


def _chosen(known: dict[str, Definition]) -> list[str]:
    """What a learner writes: public functions and methods, ``forward`` and ``__call__``.

    ``__init__`` is given, because it names the parts that weights and checks refer to; it is a task only in a class
    that has no other. Names with a leading underscore and data (named tuples, dataclasses) are given.
    """
    chosen = []
    for name, node in known.items():
        owner, _, method = name.rpartition(".")
        if isinstance(node, ast.ClassDef) or owner.startswith("_"):
            continue
        written = not method.startswith("_") or method == "__call__"
        siblings = [n.rpartition(".")[2] for n in known if owner and n.startswith(f"{owner}.")]
        alone = method == "__init__" and all(n.startswith("_") and n != "__call__" for n in siblings)
        chosen += [name] if written or alone else []
    return chosen


@dataclass
class Reach:
    """Names of the chapter's module, and attributes, that a value came by."""

    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Judged:
    """What one step tells about: ``tasks`` that it names, ``needs`` with all that these call."""

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
        rows = dict(zip((cell.id for cell in self.cells), self._walk([cell.text for cell in self.cells])))
        pairs = [p for cell in self.checks for step, p in zip(steps(cell.text), rows[cell.id]) if step.judges]
        needed = set().union(*(needs for _, needs in pairs))
        self._orphans = needed - set().union(*(named for named, _ in pairs))  # every check that needs them judges them
        chosen = [name for name in _chosen(self.known) if name in needed]
        self.tasks = [Task(f"{chapter.number}.{n}", name) for n, name in enumerate(chosen, 1)]
        self.number = {task.name: task.number for task in self.tasks}

    def judged(self, texts: Iterable[str]) -> list[list[Judged]]:
        """For every cell of a program, for every step of it, the tasks that it judges and needs."""
        return [
            [Judged(frozenset(named | needs & self._orphans), frozenset(needs)) for named, needs in row]
            for row in self._walk(texts)
        ]

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
                here = Reach(attributes=set(step.attributes))
                for name in step.now | step.later:
                    known = values.get(name, Reach())
                    here.names |= known.names
                    here.attributes |= known.attributes
                rows[-1].append((self._tasks(here, False), self._tasks(here, True)))
                for name in step.stores:
                    values[name] = Reach({name}) if self._defines(step, name) else here
                for name in step.changes & values.keys() - self.module.keys():
                    known = values[name]
                    values[name] = Reach(known.names | here.names, known.attributes | here.attributes)
        return rows

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
        if name in self.module:
            step = self.module[name]
            names, more = step.now | step.later, step.attributes
        else:
            names = {n.id for n in ast.walk(self.known[name]) if isinstance(n, ast.Name)}
            more = {n.attr for n in ast.walk(self.known[name]) if isinstance(n, ast.Attribute)}
            if any(isinstance(n, ast.Name) and n.id == "super" for n in ast.walk(self.known[name])):
                owner = self.known[name.split(".")[0]]
                bases = [b.id for b in owner.bases if isinstance(b, ast.Name)]
                queue |= {f"{base}.{m}" for base in bases for m in more}
        queue |= set(names)
        attributes |= set(more)
