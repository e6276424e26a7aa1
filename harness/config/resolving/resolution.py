"""A config on its way to DeepSpeed: what was filled in and from where, and what cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.config.diagnostic import Diagnostic, Severity
from harness.config.resolving.resolved import Filled
from harness.config.text.document import Document
from harness.config.values.arguments import AutoValues
from harness.config.values.layout_keys import size_fault
from harness.config.values.pointers import AUTO, lookup, name_of, put, whole


@dataclass
class Resolution:
    """A resolution under way: the config that is being filled, what was filled, what was found."""

    config: dict[str, Any]
    values: AutoValues
    document: Document | None
    filled: list[Filled] = field(default_factory=list)
    problems: list[Diagnostic] = field(default_factory=list)

    def get(self, pointer: str) -> Any:
        """The value at a pointer; None if it is absent."""
        return lookup(self.config, pointer)

    def section(self, pointer: str) -> Mapping[str, Any]:
        """The object at a pointer; empty if there is none."""
        value = self.get(pointer)
        return value if isinstance(value, dict) else {}

    def number(self, pointer: str) -> int | None:
        """The whole number at a pointer; None if it is absent or "auto"; anything else is a problem."""
        value = self.get(pointer)
        if value == AUTO or (
            value is None and pointer.rsplit("/", 1)[1] not in self.section(pointer.rsplit("/", 1)[0])
        ):
            return None
        fault = size_fault(pointer, value)
        if fault is not None:
            self.refuse("DS315", pointer, *fault)
        elif value is not None and whole(value) is None:
            self.refuse("DS201", pointer, f"{name_of(pointer)} is {value!r}, not a whole number", "write a number")
        return whole(value) if fault is None else None

    def fill(self, pointer: str, value: Any, source: str) -> None:
        """Write a value that was not in the file."""
        put(self.config, pointer, value)
        self.filled.append(Filled(pointer=pointer, value=value, source=source))

    def refuse(self, code: str, pointer: str, message: str, hint: str) -> None:
        """Note an error at a pointer."""
        line, column = self.document.locate(pointer) if self.document else (1, 1)
        self.problems.append(
            Diagnostic(
                code=code,
                severity=Severity.ERROR,
                message=message,
                hint=hint,
                pointer=pointer,
                file=self.document.path if self.document else "",
                line=line,
                column=column,
            )
        )

    def must_agree(self, pointer: str, name: str, in_file: Any, argument: Any) -> None:
        """Refuse an argument that was given if the file says another value in the same place."""
        if in_file is None or in_file in (AUTO, argument):
            return
        message = f"--{name} is {argument} and {name_of(pointer)} is {in_file}"
        self.refuse("DS951", pointer, message, 'give one of them, or write "auto" in the file')
