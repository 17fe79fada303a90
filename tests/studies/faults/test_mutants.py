"""Source mutants: each operator changes one place, under the lines of the original, and is taken back."""

from __future__ import annotations

import ast
import importlib
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from fsdpcheck.studies.faults import mutants, operators
from fsdpcheck.studies.faults.operators import sites


def function_of(source: str) -> operators.Function:
    found = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(found, ast.FunctionDef)
    return found


@pytest.fixture
def example(tmp_path: Path) -> ModuleType:
    """A module with functions of all kinds."""
    (tmp_path / "mutated_example.py").write_text(
        textwrap.dedent(
            """
            import functools


            def plain(a, b):
                total = a + b
                return total


            @functools.cache
            def remembered(a):
                return a + 1


            class Thing:
                factor = 2

                @property
                def double(self):
                    return self.factor * 2

                @staticmethod
                def least(values):
                    return min(values)

                @functools.cached_property
                def kept(self):
                    return self.factor - 1

                def outer(self):
                    def inner(x):
                        return x > 1
                    return inner
            """
        )
    )
    sys.path.insert(0, str(tmp_path))
    try:
        yield importlib.import_module("mutated_example")
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["mutated_example"]


@pytest.mark.parametrize(
    ("statement", "operator", "after"),
    [
        ("return a < b", "compare", ["a <= b"]),
        ("return a is b", "compare", ["a is not b"]),
        ("return a * b", "arithmetic", ["a / b"]),
        ("return a and b", "logic", ["a or b"]),
        ("return -a", "unary", ["a"]),
        ("return 1 if a else b", "condition", ["1 if True else b", "1 if False else b"]),
        ("while a:\n        b()", "condition", ["while False:"]),
        ("return 3", "constant", ["4"]),
        ("return 0.0", "constant", ["1.0"]),
        ("return True", "constant", ["False"]),
        ("a.update(b)", "left-out", [""]),
        ("a.value = b", "left-out", [""]),
        ("a += b", "arithmetic", ["a -= b"]),
        ("return a(b, dim=c)", "keyword", ["a(b)"]),
        ("return any(a)", "call", ["all(a)"]),
        ("return a.mul_(b)", "call", ["a.div_(b)"]),
        ("for c in a:\n        continue", "jump", ["break"]),
    ],
)
def test_an_operator_changes_what_it_says(statement: str, operator: str, after: list[str]) -> None:
    found = sites(function_of(f"def f(a, b, c):\n    {statement}\n"))
    assert [site.after for site in found if site.operator == operator] == after
    assert len({site.name for site in found}) == len(found)


@pytest.mark.parametrize(
    "statement",
    [
        'return "text"',
        "raise ValueError(a + b)",
        "assert a < b, a + b",
        "if a < b:\n        raise ValueError",
        'return f"{a + 1}"',
        "c: a[1] = b",
    ],
)
def test_what_no_law_judges_is_left_out(statement: str) -> None:
    assert sites(function_of(f"def f(a: x[1], b=2):\n    {statement}\n")) == []


@pytest.mark.parametrize(
    ("function", "site", "call", "right", "wrong"),
    [
        ("plain", "arithmetic.1", lambda m: m.plain(3, 4), 7, -1),
        ("remembered", "arithmetic.1", lambda m: m.remembered(3), 4, 2),
        ("Thing.double", "constant.1", lambda m: m.Thing().double, 4, 6),
        ("Thing.least", "call.1", lambda m: m.Thing.least([1, 2]), 1, 2),
        ("Thing.kept", "arithmetic.1", lambda m: m.Thing().kept, 1, 3),
        ("Thing.outer", "compare.1", lambda m: m.Thing().outer()(1), False, True),
    ],
)
def test_a_mutant_is_in_place_and_taken_back(
    example: ModuleType, function: str, site: str, call, right: object, wrong: object
) -> None:
    install = getattr(mutants, f"mutated_example/{function}/{site}")
    assert call(example) == right
    with install() as counter:
        assert counter.hits == 0
        assert call(example) == wrong
        assert counter.hits == 1
    assert call(example) == right


def test_names_outlast_lines_that_move(example: ModuleType) -> None:
    file = Path(str(example.__file__))
    before = {site.name for function in mutants.functions(file).values() for site in sites(function)}
    file.write_text("# a line more\n" + file.read_text())
    after = {site.name for function in mutants.functions(file).values() for site in sites(function)}
    assert before == after


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mutated_example", "wanted MODULE/FUNCTION/OPERATOR.NUMBER"),
        ("mutated_example/plain/compare.7", "no place compare.7 in plain"),
        ("mutated_example/Thing/compare.1", "is no function"),
        ("mutated_example/gone/compare.1", "gone"),
        ("/nowhere/x.py/plain/compare.1", "no module of /nowhere/x.py has been imported"),
    ],
)
def test_a_name_that_is_no_mutant_says_why(example: ModuleType, name: str, says: str) -> None:
    with pytest.raises(AttributeError, match=says):
        getattr(mutants, name)().__enter__()


def test_mutants_are_drawn_by_seed_among_lines_that_ran(example: ModuleType) -> None:
    file = str(example.__file__)
    lines = {(file, number) for number in range(1, 12)}
    found = mutants.all_of(lines, lambda file: "mutated_example")
    assert {one.function for one in found} == {"plain"}
    assert mutants.all_of(lines, lambda file: "") == []
    everything = mutants.all_of({(file, number) for number in range(1, 40)}, lambda file: "mutated_example")
    assert len(everything) > 4
    assert mutants.drawn(everything, 3, 1) == mutants.drawn(everything, 3, 1) != mutants.drawn(everything, 3, 2)
    assert sorted(mutants.drawn(everything, 10**6, 1), key=lambda one: one.name) == everything
