"""Mutation operators: small changes of one place of a function, in the standard classes of mutation testing.

DeMillo, Lipton, Sayward: "Hints on test data selection", Computer 1978; the operators are those of Offutt et al.: "An
experimental determination of sufficient mutant operators", TOSEM 1996 (relational, arithmetic, logical, absolute value,
unary insertion), with the deletion of statements and keywords, which stands for what was forgotten.

Left out is what no law judges: texts, annotations, decorators, defaults, assertions, and conditions of what only
raises.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

Function = ast.FunctionDef | ast.AsyncFunctionDef

_COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
}  # fmt: skip
_NAMES: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_METHODS: Final = {
    "add_": "sub_",
    "sub_": "add_",
    "mul_": "div_",
    "div_": "mul_",
    "sum": "mean",
    "min": "max",
    "max": "min",
}


@dataclass(frozen=True)
class Site:
    """A place of a function and what would stand there: ``operator`` and how many of its kind are before it.

    ``line`` and ``before`` are of the file: the statement that is altered, as it is written.
    """

    operator: str
    number: int
    line: int
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.operator}.{self.number}"


def sites(function: Function) -> list[Site]:
    """Every place of ``function`` that an operator changes, in the order of its source."""
    found: list[Site] = []
    counts: dict[str, int] = {}
    for node, operator, replacement in _changes(function):
        number = counts[operator] = counts.get(operator, 0) + 1
        after = "" if isinstance(replacement, ast.Pass) else _shown(replacement)
        found.append(Site(operator, number, node.lineno, _shown(node), after))
    return found


def changed(function: Function, name: str, hit: str) -> None:
    """Alter ``function`` at the site of this name, in place; the global ``hit`` is called before the statement.

    Raises KeyError for a name that is no site.
    """
    counts: dict[str, int] = {}
    for node, operator, replacement in _changes(function):
        counts[operator] = counts.get(operator, 0) + 1
        if name == f"{operator}.{counts[operator]}":
            ast.copy_location(replacement, node)
            statement = _statement(function, node)
            _replace(function, node, replacement)
            _count(function, replacement if statement is node else statement, hit)
            return
    raise KeyError(name)


def _changes(function: Function) -> Iterator[tuple[ast.stmt | ast.expr, str, ast.AST]]:
    """(what is replaced, operator, what stands there instead) for every place, in the order of the source."""
    for node in _judged(function):
        for kind, changes in _OPERATORS:
            if isinstance(node, kind):
                for operator, replacement in changes(node):
                    yield node, operator, replacement


def _judged(node: ast.AST) -> Iterator[ast.stmt | ast.expr]:
    """Statements and expressions inside ``node``, from the first to the last, without what no law judges."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.If) and not node.orelse and all(isinstance(each, ast.Raise) for each in node.body):
        return
    if isinstance(node, ast.stmt | ast.expr) and not isinstance(node, Function):
        yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "args", "decorator_list", "type_params") and not isinstance(
            node, ast.Call
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _judged(child)


def _compare(node: ast.Compare) -> Iterator[tuple[str, ast.AST]]:
    for place, operator in enumerate(node.ops):
        altered = copy.deepcopy(node)
        altered.ops[place] = _COMPARED[type(operator)]()
        yield "compare", altered


def _arithmetic(node: ast.BinOp) -> Iterator[tuple[str, ast.AST]]:
    if type(node.op) in _COMPUTED:
        altered = copy.deepcopy(node)
        altered.op = _COMPUTED[type(node.op)]()
        yield "arithmetic", altered


def _logic(node: ast.BoolOp) -> Iterator[tuple[str, ast.AST]]:
    altered = copy.deepcopy(node)
    altered.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield "logic", altered


def _unary(node: ast.UnaryOp) -> Iterator[tuple[str, ast.AST]]:
    yield "unary", copy.deepcopy(node.operand)


def _condition(node: ast.If | ast.IfExp | ast.While) -> Iterator[tuple[str, ast.AST]]:
    for value in (False,) if isinstance(node, ast.While) else (True, False):
        altered = copy.deepcopy(node)
        altered.test = ast.copy_location(ast.Constant(value), node.test)
        yield "condition", altered


def _constant(node: ast.Constant) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node.value, bool):
        yield "constant", ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield "constant", ast.Constant(node.value + 1)
    elif isinstance(node.value, float):
        yield "constant", ast.Constant(2 * node.value or 1.0)


def _statement_left_out(node: ast.Expr | ast.Assign | ast.AugAssign) -> Iterator[tuple[str, ast.AST]]:
    """A call whose value nobody takes, an update, a value put into an attribute or an element."""
    if isinstance(node, ast.Expr):
        wanted = isinstance(node.value, ast.Call)
    else:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        wanted = isinstance(node, ast.AugAssign) or all(isinstance(x, ast.Attribute | ast.Subscript) for x in targets)
    if wanted:
        yield "left-out", ast.Pass()
    if isinstance(node, ast.AugAssign) and type(node.op) in _COMPUTED:
        altered = copy.deepcopy(node)
        altered.op = _COMPUTED[type(node.op)]()
        yield "arithmetic", altered


def _call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    for place, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            altered = copy.deepcopy(node)
            del altered.keywords[place]
            yield "keyword", altered
    called = node.func
    if isinstance(called, ast.Name) and called.id in _NAMES:
        altered = copy.deepcopy(node)
        altered.func = ast.copy_location(ast.Name(_NAMES[called.id], ast.Load()), called)
        yield "call", altered
    if isinstance(called, ast.Attribute) and called.attr in _METHODS:
        altered = copy.deepcopy(node)
        assert isinstance(altered.func, ast.Attribute)
        altered.func.attr = _METHODS[called.attr]
        yield "call", altered


def _jump(node: ast.Break | ast.Continue) -> Iterator[tuple[str, ast.AST]]:
    yield "jump", ast.Continue() if isinstance(node, ast.Break) else ast.Break()


_Changes = Callable[[ast.AST], Iterator[tuple[str, ast.AST]]]
_OPERATORS: Final[tuple[tuple[type | tuple[type, ...], _Changes], ...]] = (
    (ast.Compare, _compare),
    (ast.BinOp, _arithmetic),
    (ast.BoolOp, _logic),
    (ast.UnaryOp, _unary),
    ((ast.If, ast.IfExp, ast.While), _condition),
    (ast.Constant, _constant),
    ((ast.Expr, ast.Assign, ast.AugAssign), _statement_left_out),
    (ast.Call, _call),
    ((ast.Break, ast.Continue), _jump),
)  # type: ignore[assignment]


def _replace(function: ast.AST, node: ast.AST, replacement: ast.AST) -> None:
    for parent in ast.walk(function):
        for name, value in ast.iter_fields(parent):
            if value is node:
                setattr(parent, name, replacement)
                return
            if isinstance(value, list) and any(each is node for each in value):
                value[next(at for at, each in enumerate(value) if each is node)] = replacement
                return
    raise KeyError(ast.dump(node))


def _statement(function: ast.AST, node: ast.AST) -> ast.AST:
    """The innermost statement that ``node`` is part of."""
    found: ast.AST = function
    for statement in ast.walk(function):  # breadth first: the last one that holds it is the innermost
        if isinstance(statement, ast.stmt) and any(each is node for each in ast.walk(statement)):
            found = statement
    return found


def _count(function: ast.AST, statement: ast.AST, hit: str) -> None:
    call = ast.Expr(ast.Call(ast.Name(hit, ast.Load()), [], []))
    for parent in ast.walk(function):
        for _, value in ast.iter_fields(parent):
            if isinstance(value, list) and any(each is statement for each in value):
                place = next(at for at, each in enumerate(value) if each is statement)
                value.insert(place, ast.copy_location(call, statement))
                return


def _shown(node: ast.AST) -> str:
    """The first line of what the source says, or would say."""
    return ast.unparse(node).splitlines()[0]
