"""What a statement reads and changes, and what a failure takes with it: a wrong answer here blames the wrong task."""

import ast
import sys

import pytest

from course.statements import handed, step_of
from course.trial import Code, Trial


def step(text: str):
    """The one statement of a text."""
    (node,) = ast.parse(text).body
    return step_of(node)


def test_a_definition_runs_nothing():
    """What stands in its body happens when it is called."""
    found = step("def loop(state):\n    train(state)\n    state.log(x)")
    assert not found.changes and "train" in found.later and "train" not in found.now
    assert not handed(found.node, {"train": frozenset({0})})
    assert handed(step("train(state)").node, {"train": frozenset({0})}) == {"state"}


@pytest.mark.parametrize(
    ("text", "reads", "not_read"),
    [
        ("for k in ks:\n    print(k)", {"ks"}, {"k"}),
        ("for k, (a, b) in pairs:\n    use(k, a, b)", {"pairs", "use"}, {"k", "a", "b"}),
        ("for x in x:\n    print(x)", {"x"}, set()),
    ],
)
def test_a_loop_binds_its_variables_before_its_body_reads_them(text, reads, not_read):
    now = step(text).now
    assert reads <= now and not now & not_read


@pytest.fixture
def trial(monkeypatch):
    """A trial in which no package is hidden; the interpreter's own state comes back."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return Trial("no_such_package.module")


def test_what_a_skipped_step_would_have_changed_is_not_what_it_should_be(trial):
    cells = [
        Code("one", "state = [0]\nother = [0]"),
        Code("two", "rate = 1 / 0\nstate.append(rate)\nother.append(1)"),
        Code("three", "assert len(state) == 2\nassert len(other) == 2"),
    ]
    states = [[result.state for result in trial.run(cell)] for cell in cells]
    assert states == [["ok", "ok"], ["failed", "skipped", "ok"], ["skipped", "ok"]]
    assert trial.poison["state"] == ("two", 0) and "other" not in trial.poison


def test_a_new_value_ends_the_poison(trial):
    trial.run(Code("one", "state = 1 / 0"))
    assert [r.state for r in trial.run(Code("two", "copy = state\nstate = 3\nassert state == 3"))] == [
        "skipped",
        "ok",
        "ok",
    ]
