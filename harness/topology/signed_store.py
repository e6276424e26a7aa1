"""A store whose values are JSON or text, signed with the secret of the run. Nothing is unpickled.

torch's store takes values from any process that reaches its port, and the agents' values name the command that a host
starts. So a value with a wrong signature is an error. An empty value, and the counters that the store adds up itself,
carry no signature: they decide when something happens, never what.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from harness.errors import UserError
from harness.topology.env import SECRET, run_secret
from harness.topology.signed_objects import signature

T = TypeVar("T")
SIGNATURE_BYTES = hashlib.sha256().digest_size * 2  # in hex


class SignedStore(dist.Store):
    """The part of a store whose values are signed with the secret of this run.

    Args:
        store: where the signed values are.
        prefix: of all keys.
        secret: by default the one in the environment. Whoever knows it may write; an empty one is known to everybody.

    Reading raises UserError for a value that was not signed with this secret.
    """

    def __init__(self, store: dist.Store, prefix: str, secret: str | None = None) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._secret = run_secret() if secret is None else secret

    def under(self, prefix: str) -> SignedStore:
        """Return the part of this store whose keys begin with a prefix."""
        return SignedStore(self._store, f"{self._prefix}{prefix}/", self._secret)

    def clone(self) -> SignedStore:
        """Return the same store on a connection of its own."""
        own: dist.Store = self._store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        return SignedStore(own, self._prefix, self._secret)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a text."""
        self._store.set(self._prefix + key, self._signed(key, value))

    def get(self, key: str) -> bytes:
        """Return a text, once somebody has written it."""
        return self._verified(key, self._store.get(self._prefix + key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several texts, once all are written."""
        values = self._store.multi_get([self._prefix + key for key in keys])
        return [self._verified(key, value) for key, value in zip(keys, values, strict=True)]

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write a text if the present one is as expected (empty: none); return what is there then."""
        expected, desired = (self._signed(key, value) for value in (expected_value, desired_value))
        return self._verified(key, self._store.compare_set(self._prefix + key, expected, desired))

    def put(self, key: str, value: object) -> None:
        """Write a dataclass, or a dict of plain values, as JSON."""
        as_json = _adapter(type(value))  # type: ignore[arg-type]  # a class is hashable
        self.set(key, as_json.dump_json(value))

    def take(self, key: str, kind: type[T]) -> T:
        """Return what `put` has written, which is of this kind."""
        as_json = _adapter(kind)  # type: ignore[arg-type]  # a class is hashable
        try:
            value = as_json.validate_json(self.get(key))
        except ValidationError as error:
            raise not_of_this_run(self._prefix + key) from error
        assert isinstance(value, kind)
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are written."""
        return self._store.check([self._prefix + key for key in keys])

    def add(self, key: str, value: int) -> int:
        """Increase a counter; return its value."""
        return self._store.add(self._prefix + key, value)

    def counts(self, keys: Sequence[str]) -> list[bytes]:
        """Return counters, as digits."""
        return self._store.multi_get([self._prefix + key for key in keys])

    def _signed(self, key: str, value: str | bytes) -> str:
        text = value.decode() if isinstance(value, bytes) else value
        return self._signature(key, text.encode()) + text if text else ""

    def _verified(self, key: str, value: bytes) -> bytes:
        found = value[:SIGNATURE_BYTES]
        text = value[SIGNATURE_BYTES:]
        if value and not hmac.compare_digest(found, self._signature(key, text).encode()):
            raise not_of_this_run(self._prefix + key)
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise not_of_this_run(self._prefix + key) from error
        return text

    def _signature(self, key: str, text: bytes) -> str:
        return signature(self._secret, self._prefix + key, text).hex()


@cache
def _adapter(kind: type) -> TypeAdapter[object]:
    return TypeAdapter(kind)


def not_of_this_run(key: str) -> UserError:
    """Return the error for a value that no agent or rank of this run can have written."""
    return UserError(
        f"{key!r} in the store of the run was not written with its secret: give all hosts the same {SECRET}; "
        "if they have it, another program writes to the store's port"
    )
