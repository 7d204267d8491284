"""The statements of a cell and the names that they read, store and change."""

import ast
import symtable
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

Definition = ast.FunctionDef | ast.ClassDef


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
    return tuple(step_of(node) for node in ast.parse(text).body)


def step_of(node: ast.stmt) -> Step:
    """Names of one statement, by scope: a comprehension's own variables are not the cell's."""
    top = symtable.symtable(ast.unparse(node), "cell", "exec")
    now = {s.get_name() for s in top.get_symbols() if s.is_referenced()}
    stores = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    if not isinstance(node, Definition):  # x[0] = … and x.a = … change x
        stores |= _root_stores(node)
    if isinstance(node, ast.For):  # the loop binds its variables before its body reads them
        bound = {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
        now -= bound - {n.id for n in ast.walk(node.iter) if isinstance(n, ast.Name)}
    inner, waiting = set(), set()
    for table in top.get_children():
        _globals(table, waiting if isinstance(node, ast.FunctionDef) else inner, waiting)
    attributes = frozenset(n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute))
    return Step(node, frozenset(now | inner), frozenset(waiting), frozenset(stores), attributes, changes(node))


def changes(node: ast.stmt) -> frozenset[str]:
    """Names that calls whose result is dropped may change, the loop's source with the loop's variable; a definition runs none.

    A loop that trains (``loss.backward()``) may change everything in it but a random generator.
    """
    inside = list(ast.walk(node))
    if isinstance(node, Definition):
        return frozenset()
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


def mutated(node: ast.FunctionDef) -> frozenset[int]:
    """Places of the parameters that a function changes: ``state`` in ``def train_step(state, …)``."""
    changed = set()
    for statement in node.body:
        changed |= changes(statement) | _root_stores(statement)
    return frozenset(place for place, argument in enumerate(node.args.args) if argument.arg in changed)


def handed(node: ast.stmt, functions: Mapping[str, frozenset[int]]) -> frozenset[str]:
    """Names that a statement hands to functions that change them, and lists whose ``append`` it hands on."""
    found = set()
    if isinstance(node, Definition):  # it runs when it is called
        return frozenset()
    for call in [n for n in ast.walk(node) if isinstance(n, ast.Call)]:
        places = functions.get(call.func.id, frozenset()) if isinstance(call.func, ast.Name) else frozenset()
        found |= {_root(argument) for place, argument in enumerate(call.args) if place in places}
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        found |= {_root(a) for a in arguments if isinstance(a, ast.Attribute) and a.attr == "append"}
    return frozenset(found - {""})


def parts(node: ast.stmt) -> list[ast.stmt]:
    """The statements in a compound one, its loop variables as assignments; or an assignment for each of ``a, b = …``."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
        pairs = zip(node.targets[0].elts, node.value.elts)
        plain = len(node.targets[0].elts) == len(node.value.elts)
        return [_assignment(target, value) for target, value in pairs] if plain else []
    if not isinstance(node, ast.For | ast.While | ast.If | ast.With | ast.Try):
        return []
    head = [_assignment(node.target, node.iter)] if isinstance(node, ast.For) else []
    for item in getattr(node, "items", []):
        head += [_assignment(item.optional_vars, item.context_expr)] if item.optional_vars else []
    handlers = [statement for handler in getattr(node, "handlers", []) for statement in handler.body]
    return head + node.body + handlers + getattr(node, "orelse", []) + getattr(node, "finalbody", [])


def _assignment(target: ast.expr, value: ast.expr) -> ast.Assign:
    return ast.copy_location(ast.Assign([target], value), target)


def _root_stores(node: ast.stmt) -> set[str]:
    """``x`` of ``x[0] = …`` and ``x.a = …``."""
    written = [n for n in ast.walk(node) if isinstance(n, ast.Attribute | ast.Subscript)]
    return {_root(n) for n in written if isinstance(n.ctx, ast.Store)} - {""}


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
