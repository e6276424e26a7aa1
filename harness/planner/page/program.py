"""A JavaScript program of the planner's functions: those that the page calls, and all that these need.

The sources are those of the modules that run, so the page and the command line have one cost model. Reading files has
no translation: functions that do it are replaced by what the page holds instead (`replaced`).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from harness.planner.page.expressions import METHODS, Reference, Untranslatable, fields_of
from harness.planner.page.statements import Statements, decorators

BUILTINS = {
    "all",
    "any",
    "bool",
    "divmod",
    "enumerate",
    "float",
    "getattr",
    "int",
    "len",
    "list",
    "max",
    "min",
    "next",
    "range",
}
BUILTINS |= {"reversed", "round", "set", "sorted", "str", "sum", "tuple", "zip", "ValueError"}
EXTERNAL = {
    "collections.Counter",
    "dataclasses.asdict",
    "dataclasses.fields",
    "dataclasses.replace",
    "functools.partial",
}
EXTERNAL |= {"itertools.accumulate", "itertools.pairwise", "math.ceil", "math.inf", "math.isfinite"}
EXTERNAL |= {"math.isqrt", "math.log2", "harness.errors.UserError"}
LIBRARY = {"json"}
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Module:
    """A module's definitions and the full names of what it imports, by the names in it."""

    name: str
    definitions: dict[str, Definition]
    imports: dict[str, str]

    @classmethod
    def read(cls, name: str) -> Module:
        """Return a module by its full name, from its source."""
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None, name
        definitions: dict[str, Definition] = {}
        imports: dict[str, str] = {}
        for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
            match node:
                case ast.FunctionDef(name=key) | ast.ClassDef(name=key) | ast.AnnAssign(target=ast.Name(id=key)):
                    definitions[key] = node
                case ast.Assign(targets=[ast.Name(id=key)]):
                    definitions[key] = node
                case ast.Assign(targets=[ast.Tuple(elts=elements)], value=ast.Tuple(elts=values)):
                    pairs = zip(elements, values, strict=True)
                    definitions |= {ast.unparse(key): ast.Assign(targets=[key], value=value) for key, value in pairs}
                case ast.ImportFrom(module=str(origin), names=names, level=0):
                    imports |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in names}
                case ast.Import(names=names):
                    imports |= {alias.asname or alias.name: alias.name for alias in names}
        return cls(name, definitions, imports)


@dataclass
class Class:
    """A class that the program has, with its methods as far as they are needed."""

    module: Module
    node: ast.ClassDef
    javascript: str
    parts: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Return the class in JavaScript."""
        body = "\n".join(self.parts.values()).replace("\n", "\n  ")
        return f"class {self.javascript} {{\n  {body}\n}}"


class Program:
    """Collects what the page calls, and writes it."""

    def __init__(self, replaced: Mapping[str, str]) -> None:
        self.replaced = replaced
        self.modules: dict[str, Module] = {}
        self.found: dict[str, Reference] = {}
        self.parts: list[str | Class] = []
        self.attributes: set[str] = set()

    def text(self, exported: Sequence[str], methods: Sequence[str] = ()) -> str:
        """Return the program: an object `planner` of what has these full names; `methods` are called from outside."""
        entries = [f"  {name.rpartition('.')[2]}: {self.require(name).javascript}," for name in exported]
        self.attributes |= set(methods)
        while self._add_methods():
            pass
        self._require_attributes()
        parts = [one.text() if isinstance(one, Class) else one for one in self.parts]
        return "\n".join([*parts, "const planner = {", *entries, "};"])

    def require(self, name: str) -> Reference:
        """Return the definition of a full name, translated with all that it needs. Untranslatable where that fails."""
        if name in self.found:
            return self.found[name]
        if name in LIBRARY:
            return Reference(javascript="py", is_module=True)
        if name in EXTERNAL:
            return Reference(javascript=f"py.{name.rpartition('.')[2]}")
        origin, _, key = name.rpartition(".")
        module = self._module(origin)
        if key in module.imports:
            return self.require(module.imports[key])
        node = module.definitions.get(key)
        javascript = name.removeprefix("harness.").replace(".", "_").replace("__init__", "")
        called = node if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None
        self.found[name] = Reference(javascript=javascript, node=called)
        if name in self.replaced:
            self.parts.append(f"const {javascript} = {self.replaced[name]};")
        elif node is None:
            raise Untranslatable(ast.Pass(), f"{name} is not defined at the top of its module")
        else:
            try:
                self._define(module, node, javascript)
            except Untranslatable as error:
                error.add_note(f"in {name}")
                raise
        return self.found[name]

    def _define(self, module: Module, node: Definition, javascript: str) -> None:
        translate = self._translator(module)
        if isinstance(node, ast.FunctionDef):
            text = translate.function(node, javascript)
            is_kept = decorators(node) & {"cache", "lru_cache"}
            self.parts.append(f"const {javascript} = py.cached({text});" if is_kept else text)
        elif isinstance(node, ast.ClassDef):
            if decorators(node) != {"dataclass"} or node.bases:
                raise Untranslatable(node, f"{node.name} is no plain dataclass")
            self.parts.append(Class(module, node, javascript, {"constructor": translate.constructor(node)}))
        elif node.value is not None:
            self.parts.append(f"const {javascript} = {translate.visit(node.value)};")

    def _translator(self, module: Module) -> Statements:
        def lookup(name: str, node: ast.AST) -> Reference:
            if name in module.imports:
                return self.require(module.imports[name])
            if name in module.definitions:
                return self.require(f"{module.name}.{name}")
            if name not in BUILTINS:
                raise Untranslatable(node, f"{name} in {module.name}")
            return Reference(javascript=f"py.{name}")

        return Statements(lookup, self.attributes)

    def _module(self, name: str) -> Module:
        if name not in self.modules:
            self.modules[name] = Module.read(name)
        return self.modules[name]

    def _add_methods(self) -> bool:
        """Translate the methods that are called; return whether there were any."""
        added = False
        for one in [part for part in self.parts if isinstance(part, Class)]:
            for method in [line for line in one.node.body if isinstance(line, ast.FunctionDef)]:
                if method.name in self.attributes and method.name not in one.parts:
                    if method.name in METHODS:
                        raise Untranslatable(method, f"{method.name} is a method of a built-in type too")
                    keyword = "get" if decorators(method) & {"property", "cached_property"} else ""
                    translate = self._translator(one.module)
                    one.parts[method.name] = translate.function(method, method.name, keyword=keyword, is_method=True)
                    added = True
        return added

    def _require_attributes(self) -> None:
        """Raise Untranslatable for an attribute that no class of the program has."""
        classes = [part for part in self.parts if isinstance(part, Class)]
        known = {name for one in classes for name in (*fields_of(one.node), *one.parts)}
        if unknown := self.attributes - known:
            raise Untranslatable(ast.Pass(), f"no class has {', '.join(sorted(unknown))}")
