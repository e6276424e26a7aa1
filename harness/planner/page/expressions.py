"""Python expressions as JavaScript, for the subset of Python that the planner is written in.

What the subset lacks is refused by `Untranslatable`, with its line. Names of modules and built-ins are resolved by
the caller (`program.py`); what Python does and JavaScript does not (floor division, truth of empty lists, dictionaries,
negative indices) is a function of `runtime.js`, which the page knows as `py`. A dictionary is a Map, a list or a tuple
an Array, a set a Set, None is null.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RESERVED = {"case", "class", "const", "default", "delete", "enum", "export", "function", "in", "let", "new", "of"}
RESERVED |= {"package", "static", "super", "switch", "this", "throw", "try", "typeof", "var", "void", "with"}
# Methods of Python's own types, functions of `py.on`.
METHODS = {"append", "as_integer_ratio", "get", "index", "items", "join", "lower", "most_common", "partition"}
METHODS |= {"removeprefix", "removesuffix", "replace", "sort", "startswith", "values"}
BOOLEAN_CALLS = {"all", "any", "bool", "isinstance"}
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "({} + {})",
    ast.Sub: "({} - {})",
    ast.Mult: "({} * {})",
    ast.Div: "({} / {})",
    ast.Pow: "({} ** {})",
    ast.Mod: "py.modulo({}, {})",
    ast.FloorDiv: "py.floorDivide({}, {})",
    ast.BitOr: "py.unite({}, {})",
}
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "{} < {}",
    ast.LtE: "{} <= {}",
    ast.Gt: "{} > {}",
    ast.GtE: "{} >= {}",
    ast.Eq: "py.equal({}, {})",
    ast.NotEq: "!py.equal({}, {})",
    ast.In: "py.contains({1}, {0})",
    ast.NotIn: "!py.contains({1}, {0})",
    ast.Is: "py.same({}, {})",
    ast.IsNot: "!py.same({}, {})",
}
LISTS = (ast.List, ast.Tuple, ast.ListComp)
SPECIFICATION = re.compile(r"\+?,?(\.\d+[f%])?")


class Untranslatable(Exception):
    """A piece of Python that is not in the subset."""

    def __init__(self, node: ast.AST, why: str) -> None:
        super().__init__(f"line {getattr(node, 'lineno', '?')}: {why}")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a name outside of a function stands for, and how JavaScript calls it.

    `node` is the function or the class whose signature its calls follow; None for values and built-ins. `is_module`:
    it stands for a module of Python's library.
    """

    javascript: str
    node: ast.FunctionDef | ast.ClassDef | None = None
    is_module: bool = False


def safe(name: str) -> str:
    """Return a name that JavaScript takes."""
    return name + "_" if name in RESERVED else name


def fields_of(node: ast.ClassDef) -> dict[str, ast.expr | None]:
    """Return the fields of a dataclass with their defaults."""
    lines = (line for line in node.body if isinstance(line, ast.AnnAssign))
    return {line.target.id: line.value for line in lines if isinstance(line.target, ast.Name)}


def names_in(target: ast.expr) -> set[str]:
    """Return the names that a target binds."""
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


class Expressions(ast.NodeVisitor):
    """Translates expressions. `lookup` resolves global names; `attributes` collects the attributes that are read."""

    def __init__(self, lookup: Callable[[str, ast.AST], Reference], attributes: set[str]) -> None:
        self.lookup = lookup
        self.attributes = attributes
        self.scopes: list[set[str]] = []

    def generic_visit(self, node: ast.AST) -> str:
        """Refuse what has no method here."""
        raise Untranslatable(node, f"{type(node).__name__} has no translation")

    def is_local(self, name: str) -> bool:
        """Whether a name is bound in the function, lambda or comprehension around."""
        return any(name in scope for scope in self.scopes)

    def visit_Constant(self, node: ast.Constant) -> str:
        if node.value is ...:
            return "py.ellipsis"
        if not isinstance(node.value, (str, int, float, type(None))):
            raise Untranslatable(node, f"a constant of type {type(node.value).__name__}")
        return json.dumps(node.value)

    def visit_Name(self, node: ast.Name) -> str:
        return safe(node.id) if self.is_local(node.id) else self.lookup(node.id, node).javascript

    def visit_Attribute(self, node: ast.Attribute) -> str:
        if not self._is_of_module(node.value):
            self.attributes.add(node.attr)
        return f"{self.visit(node.value)}.{node.attr}"

    def _is_of_module(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and not self.is_local(node.id) and self.lookup(node.id, node).is_module

    def visit_Starred(self, node: ast.Starred) -> str:
        return f"...py.list({self.visit(node.value)})"

    def visit_NamedExpr(self, node: ast.NamedExpr) -> str:
        return f"({safe(node.target.id)} = {self.visit(node.value)})"

    def visit_IfExp(self, node: ast.IfExp) -> str:
        return f"({self.test(node.test)} ? {self.visit(node.body)} : {self.visit(node.orelse)})"

    def visit_Lambda(self, node: ast.Lambda) -> str:
        if node.args.defaults or node.args.vararg or node.args.kwonlyargs:
            raise Untranslatable(node, "a lambda takes plain arguments alone")
        names = [argument.arg for argument in node.args.args]
        self.scopes.append(set(names))
        body = self.visit(node.body)
        self.scopes.pop()
        return f"(({', '.join(map(safe, names))}) => {body})"

    def visit_BinOp(self, node: ast.BinOp) -> str:
        if isinstance(node.op, ast.Mult) and isinstance(node.left, ast.List):
            return f"py.repeat({self.visit(node.left)}, {self.visit(node.right)})"
        if isinstance(node.left, LISTS) or isinstance(node.right, LISTS):
            raise Untranslatable(node, "an operator on lists: write [*first, *second]")
        return self.operation(node, self.visit(node.left), self.visit(node.right))

    def operation(self, node: ast.BinOp | ast.AugAssign, left: str, right: str) -> str:
        """Return an operator between two translated sides."""
        form = OPERATORS.get(type(node.op))
        if form is None:
            raise Untranslatable(node, f"operator {type(node.op).__name__}")
        return form.format(left, right)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> str:
        if isinstance(node.op, ast.Not):
            return f"!{self.test(node.operand)}"
        if isinstance(node.op, ast.USub):
            return f"(-{self.visit(node.operand)})"
        raise Untranslatable(node, f"operator {type(node.op).__name__}")

    def visit_BoolOp(self, node: ast.BoolOp) -> str:
        if all(map(self._is_boolean, node.values)):
            return self.test(node)
        first, *others = [self.visit(value) for value in node.values]
        chosen = "or" if isinstance(node.op, ast.Or) else "and"
        return f"py.{chosen}({first}, {', '.join(f'() => {other}' for other in others)})"

    def test(self, node: ast.expr) -> str:
        """Return a condition: whether Python takes the value as true."""
        if isinstance(node, ast.BoolOp):
            operator = " || " if isinstance(node.op, ast.Or) else " && "
            return f"({operator.join(map(self.test, node.values))})"
        return self.visit(node) if self._is_boolean(node) else f"py.truthy({self.visit(node)})"

    def _is_boolean(self, node: ast.expr) -> bool:
        match node:
            case ast.Compare() | ast.UnaryOp(op=ast.Not()) | ast.Constant(value=bool()):
                return True
            case ast.Call(func=ast.Name(id=name)):
                return name in BOOLEAN_CALLS
            case ast.BoolOp(values=values):
                return all(map(self._is_boolean, values))
        return False

    def visit_Compare(self, node: ast.Compare) -> str:
        sides = [node.left, *node.comparators]
        for middle in sides[1:-1]:
            if not isinstance(middle, (ast.Name, ast.Constant, ast.Attribute)):
                raise Untranslatable(middle, "the middle of a chained comparison is evaluated twice: name it first")
        parts = []
        for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
            parts.append(COMPARISONS[type(operator)].format(self.visit(left), self.visit(right)))
        return f"({' && '.join(parts)})"

    def visit_Subscript(self, node: ast.Subscript) -> str:
        value = self.visit(node.value)
        if isinstance(node.slice, ast.Slice):
            bounds = (node.slice.lower, node.slice.upper, node.slice.step)
            return f"py.slice({value}, {', '.join('null' if x is None else self.visit(x) for x in bounds)})"
        return f"py.at({value}, {self.visit(node.slice)})"

    def visit_List(self, node: ast.List | ast.Tuple) -> str:
        return f"[{self.joined(node.elts)}]"

    visit_Tuple = visit_List

    def visit_Set(self, node: ast.Set) -> str:
        return f"new Set([{self.joined(node.elts)}])"

    def visit_Dict(self, node: ast.Dict) -> str:
        pairs = zip(node.keys, node.values, strict=True)
        parts = [f"...{self.visit(v)}" if k is None else f"[{self.visit(k)}, {self.visit(v)}]" for k, v in pairs]
        return f"new Map([{', '.join(parts)}])"

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> str:
        return self._mapped(node.generators, lambda: self.visit(node.elt))

    visit_GeneratorExp = visit_ListComp  # all at once: nothing here has effects

    def visit_SetComp(self, node: ast.SetComp) -> str:
        return f"new Set({self._mapped(node.generators, lambda: self.visit(node.elt))})"

    def visit_DictComp(self, node: ast.DictComp) -> str:
        pairs = self._mapped(node.generators, lambda: f"[{self.visit(node.key)}, {self.visit(node.value)}]")
        return f"new Map({pairs})"

    def _mapped(self, generators: Sequence[ast.comprehension], element: Callable[[], str]) -> str:
        """Return the Array of a comprehension."""
        first, *others = generators
        source = f"py.list({self.visit(first.iter)})"
        self.scopes.append(names_in(first.target))
        target = self.target(first.target)
        for condition in first.ifs:
            source += f".filter(({target}) => {self.test(condition)})"
        if others:
            source += f".flatMap(({target}) => {self._mapped(others, element)})"
        else:
            source += f".map(({target}) => {element()})"
        self.scopes.pop()
        return source

    def target(self, node: ast.expr) -> str:
        """Return what a comprehension, a loop or an assignment binds."""
        match node:
            case ast.Name(id=name):
                return safe(name)
            case ast.Starred(value=ast.Name(id=name)):
                return f"...{safe(name)}"
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return f"[{', '.join(map(self.target, elements))}]"
        raise Untranslatable(node, "this target")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> str:
        return "(" + " + ".join(['""', *map(self.visit, node.values)]) + ")"

    def visit_FormattedValue(self, node: ast.FormattedValue) -> str:
        value = self.visit(node.value)
        if node.conversion == ord("r"):
            return f"py.repr({value})"
        specification = "" if node.format_spec is None else ast.unparse(node.format_spec)[2:-1]
        if not SPECIFICATION.fullmatch(specification):
            raise Untranslatable(node, f"format {specification!r}")
        return f"py.format({value}, {json.dumps(specification)})"

    def joined(self, nodes: Sequence[ast.expr]) -> str:
        """Return elements or arguments."""
        return ", ".join(map(self.visit, nodes))
