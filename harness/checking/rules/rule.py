"""A rule: a function over one config, with a code, a page and two examples.

The function's docstring is the page that `ds-harness explain CODE` prints. It ends with the examples: `Wrong:` is a
config in which the rule finds something, `Right:` a minimally different one in which it does not. `claim` states what
DeepSpeed itself does with the wrong one; a test checks that.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from harness.checking.rules.view import RunView
from harness.config.text.diagnostic import Edit, Severity
from harness.config.values.json_object import JsonObject

# refuses: DeepSpeed's parser raises; engine: deepspeed.initialize raises; runs: both accept it;
# elsewhere: it shows only with several processes, with a model, or in another program
Claim = Literal["refuses", "engine", "runs", "elsewhere"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding at one position of a config. The rule adds its code, and its severity unless one is given here."""

    pointer: str
    message: str
    hint: str = ""
    deepspeed: str = ""
    severity: Severity | None = None
    on_value: bool = False  # underline the value and not the key
    span: tuple[int, int] | None = None  # offsets into the text, for a place that no pointer names
    edits: tuple[Edit, ...] = ()
    is_safe: bool = True  # the edits leave the training unchanged, or it could not run before


Check = Callable[[RunView], Iterator[Finding]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule and its page."""

    code: str
    name: str
    severity: Severity
    claim: Claim
    options: JsonObject  # how `check` is called for the examples: world_size, model, target
    check: Check

    @cached_property
    def _docstring(self) -> list[str]:
        """The page, the wrong example and the right one."""
        text = inspect.cleandoc(self.check.__doc__ or "")
        return [part.replace("\n       ", "\n") for part in re.split(r"\n+(?:Wrong|Right): ", text)]

    @property
    def page(self) -> str:
        """The rule's documentation."""
        return self._docstring[0]

    @property
    def wrong(self) -> str:
        """The JSON of a config in which the rule finds something."""
        return self._docstring[1]

    @property
    def right(self) -> str:
        """The JSON of a similar config in which the rule finds nothing."""
        return self._docstring[2]

    @property
    def title(self) -> str:
        """The first sentence of the page."""
        return self.page.split("\n\n")[0].replace("\n", " ")


def rule(code: str, name: str, severity: Severity, *, claim: Claim, **options: object) -> Callable[[Check], Rule]:
    """Make a function a rule."""

    def decorate(check: Check) -> Rule:
        return Rule(code=code, name=name, severity=severity, claim=claim, options=options, check=check)

    return decorate
