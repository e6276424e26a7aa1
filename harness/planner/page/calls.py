"""Calls: their arguments in the order of the signature, as JavaScript knows no keywords."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from harness.planner.page.expressions import METHODS, Expressions, Reference, Untranslatable, fields_of


class Calls(Expressions):
    """Translates calls too: of functions and classes of the planner, of built-ins, and of methods."""

    def visit_Call(self, node: ast.Call) -> str:
        match node.func:
            case ast.Name(id="isinstance"):
                return f"py.isinstance({self.visit(node.args[0])}, {self._types(node.args[1])})"
            case ast.Name(id=name) if not self.is_local(name):
                return self._named(node, self.lookup(name, node))
            case ast.Attribute(attr=name, value=value) if name in METHODS:
                arguments = [self.visit(value), *map(self.visit, node.args)]
                return self._with_keywords(f"py.on.{name}", node.keywords, arguments)
        if node.keywords:
            raise Untranslatable(node, "keywords for a function that is not known by its name")
        return f"{self.visit(node.func)}({self.joined(node.args)})"

    def _named(self, node: ast.Call, called: Reference) -> str:
        if isinstance(called.node, ast.ClassDef):
            return f"new {called.javascript}({self._fields(node, called.node)})"
        if called.node is None:
            return self._with_keywords(called.javascript, node.keywords, list(map(self.visit, node.args)))
        return f"{called.javascript}({', '.join(self._ordered(node, called.node.args))})"

    def _with_keywords(self, function: str, keywords: Sequence[ast.keyword], arguments: list[str]) -> str:
        """Return the call of a function of `py`: one with keywords has a name of its own, and takes them first."""
        if not keywords:
            return f"{function}({', '.join(arguments)})"
        return f"{function}With({', '.join([self._object(keywords), *arguments])})"

    def _fields(self, node: ast.Call, made: ast.ClassDef) -> str:
        """Return the fields of a new object."""
        fields = fields_of(made)
        positional = zip(fields, node.args, strict=False)
        keywords = [*(ast.keyword(arg=name, value=value) for name, value in positional), *node.keywords]
        given = {keyword.arg for keyword in keywords}
        missing = [name for name, default in fields.items() if default is None and name not in given]
        if None not in given and (missing or given - set(fields)):
            raise Untranslatable(node, f"{made.name} without {missing}, or with other fields than its own")
        return self._object(keywords)

    def _object(self, keywords: Sequence[ast.keyword]) -> str:
        parts = [
            f"...Object.fromEntries({self.visit(one.value)})"
            if one.arg is None
            else f"{one.arg}: {self.visit(one.value)}"
            for one in keywords
        ]
        return f"{{ {', '.join(parts)} }}"

    def _ordered(self, node: ast.Call, signature: ast.arguments) -> list[str]:
        """Return the arguments of a known function by position."""
        names = [argument.arg for argument in (*signature.args, *signature.kwonlyargs)]
        given = list(map(self.visit, node.args))
        stated = {one.arg: self.visit(one.value) for one in node.keywords}
        if not stated:
            return given
        if set(stated) - set(names[len(given) :]) or any(isinstance(one, ast.Starred) for one in node.args):
            raise Untranslatable(node, "arguments that its signature does not order")
        ordered = [*given, *(stated.get(name, "undefined") for name in names[len(given) :])]
        while ordered[-1] == "undefined":
            ordered.pop()
        return ordered

    def _types(self, node: ast.expr) -> str:
        kinds = node.elts if isinstance(node, ast.Tuple) else [node]
        return "[" + ", ".join(f'"{ast.unparse(kind)}"' for kind in kinds) + "]"
