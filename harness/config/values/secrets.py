"""Keep passwords, API keys and tokens out of a run's files, because people share result folders unchecked.

They are recognised by the names of their keys, by values of environment variables, and by known token formats.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from harness.config.values.json_object import JsonObject

HIDDEN = "***"
# Secrets of fewer characters are not searched for in texts: they may be ordinary words.
SHORTEST = 8
_NAME = (
    r"(?:[\w.-]*[_.-])?(?:api[_-]?keys?|secrets?(?:[_-]?key)?|pass(?:word|wd|phrase)s?|pwd|credentials?|authorization"
    r"|(?:private|account|client|comet|encryption|license|service|signing|ssh|wandb)[_-]?key"
    r"|(?:secret[_-]?)?access[_-]?key(?:[_-]?id)?|(?:auth|access|api|hub|hf|bearer|refresh|session)[_-]?tokens?)"
)
_KEY = re.compile(rf"{_NAME}|token", re.IGNORECASE)
_VARIABLE = re.compile(rf"{_NAME}|\w*_(?:TOKEN|KEY|SECRET|PAT|DSN)|\w+PASSWORD", re.IGNORECASE)
_IN_TEXT = re.compile(
    rf"""(?P<name>(?<![\w.-])\\?["']?{_NAME}\\?["']?\s*[:=]\s*|--{_NAME}\s+)"""
    r"""(?:(?P<quote>\\?["']).*?(?P=quote)|[^\s"'\\,}}]+)""",
    re.IGNORECASE,
)
_MASKED = [
    # The password of a URL, also of one that became a path and lost a slash. A long user name alone is a token.
    re.compile(r"(?P<kept>:/{1,2}[^/\s:@]*:)[^/\s@]+(?=@)"),
    re.compile(r"(?P<kept>:/{1,2})[^/\s:@]{16,}(?=@)"),
    # Parameters of signed URLs and of database connections.
    re.compile(rf"(?P<kept>[?&;](?:{_NAME}|[\w-]*(?:sig|signature|token|key))=)[^&;\s\"']+", re.IGNORECASE),
    re.compile(r"(?P<kept>\b(?:Bearer|Basic)\s+)[\w.~+/=-]{8,}"),
    # Formats of HuggingFace, GitHub, GitLab, OpenAI, Slack and AWS.
    re.compile(
        r"(?P<kept>\b)(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
        r"|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{16}\b)"
    ),
]
_PASSWORD_OF_URL = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")


@dataclass(frozen=True)
class Secrets:
    """The secrets that must not be written.

    Attributes:
        values: the secrets themselves.
    """

    values: frozenset[str]

    @classmethod
    def known(cls, *configs: Mapping[str, object]) -> Self:
        """Return the secrets in this process's environment and in configs, by names of variables and keys."""
        # PWD is the working directory.
        found = {value for name, value in os.environ.items() if _VARIABLE.fullmatch(name) and name != "PWD"}
        found |= {password for value in os.environ.values() for password in _PASSWORD_OF_URL.findall(value)}
        return cls(frozenset(value for value in found.union(*map(_values, configs)) if len(value) >= SHORTEST))

    def without(self, content: Mapping[str, object]) -> JsonObject:
        """Return a copy of a JSON object without secret keys, and with secrets masked in texts and other keys."""
        return {
            self.masked(name) if isinstance(name, str) else name: self._clean(value)
            for name, value in content.items()
            if not is_secret(name, value)
        }

    def masked(self, text: str) -> str:
        """Return a text with every secret replaced by `***`."""
        # The longest first: a secret may contain a shorter one.
        for value in sorted(self.values, key=len, reverse=True):
            text = text.replace(value, HIDDEN)
        for pattern in _MASKED:
            text = pattern.sub(rf"\g<kept>{HIDDEN}", text)
        return text

    def _clean(self, value: object) -> object:
        if isinstance(value, str):
            return self.masked(value)
        if isinstance(value, Mapping):
            return self.without(value)
        if isinstance(value, list | tuple):
            return [self._clean(item) for item in value]
        return value


def is_secret(name: object, value: object) -> bool:
    """Return whether a key names a secret and its value may be one; switches, fractions and null are not."""
    return _KEY.fullmatch(str(name)) is not None and not (value is None or isinstance(value, bool | float))


def without_secret_texts(config: Mapping[str, object]) -> JsonObject:
    """Return a model's config without texts under secret keys, and with known token formats masked.

    Numbers stay, as `label2id` may have a label `token`, and so do templates, which are programs.
    """
    kept = {name: value for name, value in config.items() if isinstance(value, int) or not is_secret(name, value)}
    return {name: _without_texts(value, name) for name, value in kept.items()}


def _without_texts(value: object, name: str) -> object:
    if isinstance(value, Mapping):
        return without_secret_texts(value)
    if isinstance(value, list):
        return [_without_texts(item, name) for item in value]
    return Secrets(frozenset()).masked(value) if isinstance(value, str) and name != "chat_template" else value


def masked_by_name(text: str) -> str:
    """Return a line of a config or a command with the values of secret keys replaced by `***`."""
    return _IN_TEXT.sub(rf"\g<name>{HIDDEN}", text)


def _values(config: object, *, within: bool = False) -> Iterator[str]:
    """Yield each text under a secret key; `within` says whether `config` itself is under one."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            yield from _values(value, within=within or is_secret(name, value))
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _values(value, within=within)
    elif isinstance(config, str):
        yield from [config] if within else _PASSWORD_OF_URL.findall(config)
