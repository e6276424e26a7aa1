"""Functions and dataclasses of Python as JavaScript, for the subset of `expressions.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from harness.planner.page.calls import Calls
from harness.planner.page.expressions import Untranslatable, fields_of, names_in, safe

DECORATORS = {"cache", "lru_cache", "dataclass", "property", "cached_property"}


def decorators(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Return the names of the decorators. Untranslatable for one that is not known."""
    names = {ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list}
    if names - DECORATORS:
        raise Untranslatable(node, f"decorator {', '.join(names - DECORATORS)}")
    return names


def own_nodes(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body, without those of functions within it."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef):
            for child in ast.iter_child_nodes(node):
                yield from _within(child)


def _within(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
        for child in ast.iter_child_nodes(node):
            yield from _within(child)


def bound_names(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names that a function's body binds, its inner functions' among them."""
    names: set[str] = set()
    for node in own_nodes(body):
        match node:
            case ast.Assign(targets=targets):
                names |= {name for target in targets for name in names_in(target) if _is_bound(target)}
            case ast.AnnAssign(target=target) | ast.AugAssign(target=target) | ast.For(target=target):
                names |= names_in(target) if _is_bound(target) else set()
            case ast.NamedExpr(target=ast.Name(id=name)) | ast.FunctionDef(name=name):
                names.add(name)
    return names


def _is_bound(target: ast.expr) -> bool:
    return not isinstance(target, (ast.Subscript, ast.Attribute))


class Statements(Calls):
    """Translates statements: each method returns lines of JavaScript."""

    def function(self, node: ast.FunctionDef, name: str, *, keyword: str = "function", is_method: bool = False) -> str:
        """Return a function under a name; of a method the first argument is `this`."""
        signature = node.args
        arguments = signature.args[1:] if is_method else signature.args
        self.scopes.append({one.arg for one in (*signature.args, *signature.kwonlyargs)} | bound_names(node.body))
        if signature.vararg:
            self.scopes[-1].add(signature.vararg.arg)
        parameters = self._parameters(signature, arguments)
        inner = bound_names(node.body) - {one.arg for one in (*signature.args, *signature.kwonlyargs)}
        lines = [f"const {signature.args[0].arg} = this;"] if is_method else []
        lines += [f"let {', '.join(sorted(map(safe, inner)))};"] if inner else []
        lines += self.block(node.body)
        self.scopes.pop()
        is_generator = any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in own_nodes(node.body))
        star = "*" if is_generator else ""
        return f"{keyword}{star} {name}({', '.join(parameters)}) {{\n" + _indented(lines) + "\n}"

    def _parameters(self, signature: ast.arguments, arguments: Sequence[ast.arg]) -> list[str]:
        if signature.kwarg or signature.posonlyargs or (signature.vararg and signature.kwonlyargs):
            raise Untranslatable(signature, "these parameters")
        plain: list[ast.expr | None] = [None] * (len(arguments) - len(signature.defaults))
        defaults = [*plain, *signature.defaults, *signature.kw_defaults]
        pairs = zip([*arguments, *signature.kwonlyargs], defaults, strict=True)
        parameters = [
            safe(one.arg) if default is None else f"{safe(one.arg)} = {self.visit(default)}" for one, default in pairs
        ]
        return parameters + ([f"...{safe(signature.vararg.arg)}"] if signature.vararg else [])

    def constructor(self, node: ast.ClassDef) -> str:
        """Return the constructor of a dataclass: it takes an object of fields."""
        lines = []
        for name, default in fields_of(node).items():
            value = f"fields.{name}"
            if default is not None:
                value += f" === undefined ? {self.visit(default)} : fields.{name}"
            lines.append(f"this.{name} = {value};")
        return "constructor(fields) {\n" + _indented(lines) + "\n}"

    def block(self, body: Sequence[ast.stmt]) -> list[str]:
        """Return the lines of statements."""
        return [line for statement in body for line in self.visit(statement)]

    def visit_Expr(self, node: ast.Expr) -> list[str]:
        if isinstance(node.value, ast.Constant):
            return []  # a docstring
        if isinstance(node.value, ast.Yield) and node.value.value is not None:
            return [f"yield {self.visit(node.value.value)};"]
        if isinstance(node.value, ast.YieldFrom):
            return [f"yield* py.iterate({self.visit(node.value.value)});"]
        return [f"{self.visit(node.value)};"]

    def visit_Return(self, node: ast.Return) -> list[str]:
        return [f"return {self.visit(node.value) if node.value else ''};"]

    def visit_Raise(self, node: ast.Raise) -> list[str]:
        if not isinstance(node.exc, ast.Call):
            raise Untranslatable(node, "an exception without a message")
        return [f"throw {self.visit(node.exc)};"]

    def visit_Assert(self, node: ast.Assert) -> list[str]:
        return [f"py.require({self.test(node.test)});"]

    def visit_Continue(self, node: ast.Continue) -> list[str]:  # noqa: ARG002
        return ["continue;"]

    def visit_Break(self, node: ast.Break) -> list[str]:  # noqa: ARG002
        return ["break;"]

    def visit_Assign(self, node: ast.Assign) -> list[str]:
        *others, last = node.targets
        if not all(isinstance(one, ast.Name) for one in others):
            raise Untranslatable(node, "several targets that are not names")
        shared = "".join(f"{self.target(one)} = " for one in others)
        return [shared + self._assigned(last, self.visit(node.value))]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> list[str]:
        return [self._assigned(node.target, self.visit(node.value))] if node.value else []

    def visit_AugAssign(self, node: ast.AugAssign) -> list[str]:
        old = self.visit(node.target)
        return [self._assigned(node.target, self.operation(node, old, self.visit(node.value)))]

    def _assigned(self, target: ast.expr, value: str) -> str:
        if isinstance(target, ast.Subscript):
            return f"py.put({self.visit(target.value)}, {self.visit(target.slice)}, {value});"
        if isinstance(target, ast.Tuple):
            return f"{self.target(target)} = py.list({value});"
        return f"{self.target(target)} = {value};"

    def visit_If(self, node: ast.If) -> list[str]:
        lines = [f"if ({self.test(node.test)}) {{", _indented(self.block(node.body)), "}"]
        if node.orelse:
            lines[-1] = "} else {"
            lines += [_indented(self.block(node.orelse)), "}"]
        return lines

    def visit_For(self, node: ast.For) -> list[str]:
        if node.orelse:
            raise Untranslatable(node, "for with else")
        head = f"for ({self.target(node.target)} of py.iterate({self.visit(node.iter)})) {{"
        return [head, _indented(self.block(node.body)), "}"]

    def visit_Match(self, node: ast.Match) -> list[str]:
        lines = [f"switch ({self.visit(node.subject)}) {{"]
        for case in node.cases:
            options = case.pattern.patterns if isinstance(case.pattern, ast.MatchOr) else [case.pattern]
            for one in options:
                if not isinstance(one, ast.MatchValue) or case.guard:
                    raise Untranslatable(node, "a pattern other than values")
                lines.append(f"  case {self.visit(one.value)}:")
            if not isinstance(case.body[-1], (ast.Return, ast.Raise)):
                raise Untranslatable(node, "a case that does not return")
            lines.append(_indented(self.block(case.body)))
        return [*lines, "}"]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> list[str]:
        if node.decorator_list:
            raise Untranslatable(node, "an inner function with a decorator")
        return [f"{safe(node.name)} = {self.function(node, '')};"]


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}" for text in lines for line in text.split("\n"))
