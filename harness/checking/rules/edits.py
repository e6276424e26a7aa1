"""Change a config's text and keep its order, layout and comments: remove, rename, replace, insert.

Each function returns edits for the text as it was read, which are applied together. For further edits, parse the new
text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from harness.config.text.diagnostic import Edit
from harness.config.text.document import Document
from harness.config.text.parser import Member, Node


def apply(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with all edits made; they must not overlap."""
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
        text = text[: edit.start] + edit.new + text[edit.end :]
    return text


def member(document: Document, pointer: str) -> Member | None:
    """Return the member of an object that a pointer names."""
    node: Node = document.parsed.root
    found: Member | Node | None = None
    for step in pointer.split("/")[1:]:
        found = node.child(step.replace("~1", "/").replace("~0", "~"))
        if not isinstance(found, Member):
            return None
        node = found.node
    return found if isinstance(found, Member) else None


def section(document: Document, pointer: str) -> Node | None:
    """Return the object that a pointer names; the whole config for an empty pointer."""
    if not pointer:
        return document.parsed.root
    found = member(document, pointer)
    return found.node if found is not None and found.node.members is not None else None


def remove(document: Document, pointer: str) -> tuple[Edit, ...]:
    """Return edits that remove a key and its value, with the comma and the line that are no longer needed."""
    parent = section(document, pointer.rsplit("/", 1)[0])
    found = member(document, pointer)
    if parent is None or found is None or parent.members is None:
        return ()
    text = document.text
    position = parent.members.index(found)
    if position + 1 < len(parent.members):
        return (Edit(start=found.key_start, end=parent.members[position + 1].key_start, new=""),)
    if position > 0:
        return (Edit(start=parent.members[position - 1].node.end, end=found.node.end, new=""),)
    end = found.node.end
    while text[end : end + 1] in (",", " ", "\t", "\n", "\r") and end < parent.end - 1:
        end += 1
    return (Edit(start=parent.start + 1, end=end, new=""),)


def rename(document: Document, pointer: str, new: str) -> tuple[Edit, ...]:
    """Return edits that rename a key; none if its section has the new name already."""
    parent = section(document, pointer.rsplit("/", 1)[0])
    found = member(document, pointer)
    if parent is None or found is None or parent.child(new) is not None:
        return ()
    return (Edit(start=found.key_start, end=found.key_end, new=json.dumps(new)),)


def replace(document: Document, pointer: str, value: object) -> tuple[Edit, ...]:
    """Return edits that replace the value at a pointer."""
    found = member(document, pointer)
    if found is None:
        return ()
    return (Edit(start=found.node.start, end=found.node.end, new=json.dumps(value)),)


def move(document: Document, pointer: str, target: str) -> tuple[Edit, ...]:
    """Return edits that move a key to another pointer; none if that is taken, or its section is no object."""
    found = member(document, pointer)
    if found is None or member(document, target) is not None:
        return ()
    written = document.text[found.node.start : found.node.end]
    added = insert(document, target, written, leaving=found)
    return (*remove(document, pointer), *added) if added else ()


def insert(document: Document, pointer: str, written: str, leaving: Member | None = None) -> tuple[Edit, ...]:
    """Return edits that add `pointer` with `written` as its value, and its section if that is missing.

    `leaving` is a key that is removed at the same time.
    """
    parent_pointer, name = pointer.rsplit("/", 1)
    entry = f"{json.dumps(name)}: {written}"
    parent = section(document, parent_pointer)
    if parent is None:
        if not parent_pointer or parent_pointer.count("/") > 1 or member(document, parent_pointer) is not None:
            return ()
        entry = f"{json.dumps(parent_pointer[1:])}: {{{entry}}}"
        parent = document.parsed.root
    if not parent.members or parent.members == (leaving,):
        return (Edit(start=parent.start + 1, end=parent.start + 1, new=entry),)
    last = parent.members[-1]
    line_start = document.text.rfind("\n", 0, last.key_start) + 1
    indent = document.text[line_start : last.key_start]
    own_line = not indent.strip()
    gap = f",\n{indent}" if own_line else ", "
    return (Edit(start=last.node.end, end=last.node.end, new=gap + entry),)
