"""Render conversations with a chat template, which is somebody else's program, in bounded time and memory.

Nothing inside a process can interrupt Python while it repeats a string or computes a large power. So each process
renders all its conversations in one child process, and kills it when a template takes too much time or memory.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from harness.config.values.json_object import JsonObject
from harness.errors import UserError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess

MOST_CHARACTERS = 1 << 26
"""Limit for the output of a template, in characters: many times what a model can read."""
MOST_SECONDS = 20
"""Limit of CPU seconds for one conversation. A usual template takes milliseconds."""
_MOST_BYTES = 1 << 30
_PATIENCE_S = 120.0
_POLL_S = 1.0
_NO_MEMORY = 3


class Rejected(UserError):
    """The template rejects a conversation."""


class TemplateProcess:
    """Renders conversations with one template.

    Args:
        source: the template, in Jinja.
        names: variable of the template -> special token of the tokenizer.
    """

    def __init__(self, source: str, names: Mapping[str, Any]) -> None:
        self._source = source
        self._names = dict(names)
        self._owner = 0  # a forked process needs a template process of its own
        self._process: ForkProcess | None = None
        self._there: Connection[Any, Any] | None = None

    def write(self, messages: Sequence[JsonObject], tools: list[Any] | None, location: str, **how: Any) -> Any:
        """Return the result of transformers' `render_jinja_template` for one conversation.

        Raises Rejected, with the location, if the template rejects the conversation, and UserError for a template that
        takes too much time or memory, or writes too much.
        """
        if self._there is None or self._owner != os.getpid():
            self._start()
        assert self._there is not None
        try:
            self._there.send((messages, tools, how))
            if not self._there.poll(_PATIENCE_S):
                self._stop(location)
            written, reason = self._there.recv()
        except (EOFError, OSError):
            self._stop(location)
        if reason is not None:
            raise Rejected(f"{location}: the chat template rejects it: {reason}")
        if written is None:
            raise UserError(
                f"{location}: the chat template writes more than {MOST_CHARACTERS:,} characters: correct it"
            )
        return written

    def _start(self) -> None:
        from transformers.utils import chat_template_utils as _  # noqa: F401  # so that the child need not import it

        context = get_context("fork")
        self._there, there = context.Pipe()
        self._process = context.Process(target=self._serve, args=(there, self._there, os.getpid()), daemon=True)
        self._process.start()
        self._owner = os.getpid()
        there.close()

    def _stop(self, location: str) -> NoReturn:
        """End the process, and raise UserError that names the limit it has exceeded."""
        process, there = self._process, self._there
        assert process is not None and there is not None
        self._process = self._there = None
        there.close()
        process.join(_POLL_S)
        process.kill()
        process.join()
        if process.exitcode == _NO_MEMORY:
            raise UserError(f"{location}: the chat template takes more than 1 GiB of memory for this: correct it")
        raise UserError(f"{location}: the chat template does not end within {MOST_SECONDS} s: correct it")

    def _serve(self, there: Connection[Any, Any], others: Connection[Any, Any], parent: int) -> NoReturn:
        """Answer requests in the new process until the other end is closed."""
        others.close()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + _MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        while True:
            while not there.poll(_POLL_S):
                if os.getppid() != parent:
                    os._exit(0)
            try:
                messages, tools, how = there.recv()
                seconds = int(time.process_time()) + 1 + MOST_SECONDS
                resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
                there.send(self._answer(messages, tools, how))
            except MemoryError:
                os._exit(_NO_MEMORY)
            except (EOFError, OSError):
                os._exit(0)

    def _answer(
        self, messages: Sequence[JsonObject], tools: list[Any] | None, how: Mapping[str, Any]
    ) -> tuple[Any, str | None]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            written = render_jinja_template(
                conversations=[list(messages)], tools=tools, chat_template=self._source, **how, **self._names
            )
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            return None, (" ".join(str(error).split()) or type(error).__name__)[:200]
        return (written if len(written[0][0]) <= MOST_CHARACTERS else None), None
