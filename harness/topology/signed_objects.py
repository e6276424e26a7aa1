"""Sign the Python objects that ranks send each other through torch.distributed.

torch pickles them, and unpickling runs any code that the sender chooses. gloo does not notice if another user's process
takes a rank's place in a connection, so that process could run code as this user. But it cannot sign.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
from typing import IO

import torch.distributed as dist

from harness.topology.env import SECRET, run_secret

SIGNATURE_BYTES = hashlib.sha256().digest_size
SUBJECT = "object"


def signature(secret: str, subject: str, content: bytes) -> bytes:
    """Return the HMAC that proves that a rank or an agent of the run wrote `content`."""
    return hmac.new(secret.encode(), subject.encode() + b"\0" + content, hashlib.sha256).digest()


def sign_objects() -> None:
    """Sign from now on if this run has a secret; all ranks must call it."""
    if secret := run_secret():
        # torch has no public way to replace the pickler of its object collectives.
        module = dist.distributed_c10d
        module._pickler = lambda file: SigningPickler(file, secret)  # type: ignore[assignment,misc]  # noqa: SLF001
        module._unpickler = lambda file: VerifyingUnpickler(file, secret)  # type: ignore[assignment,misc]  # noqa: SLF001


class SigningPickler:
    def __init__(self, file: IO[bytes], secret: str) -> None:
        self._file = file
        self._secret = secret

    def dump(self, value: object) -> None:
        content = pickle.dumps(value)
        self._file.write(signature(self._secret, SUBJECT, content))
        self._file.write(content)


class VerifyingUnpickler:
    def __init__(self, file: IO[bytes], secret: str) -> None:
        self._file = file
        self._secret = secret

    def load(self) -> object:
        """Return the object. Raises RuntimeError unless its sender knows the secret."""
        found = self._file.read(SIGNATURE_BYTES)
        content = self._file.read()
        # In constant time: how long it takes to differ would tell a forger how many bytes are right.
        if not hmac.compare_digest(found, signature(self._secret, SUBJECT, content)):
            raise RuntimeError(
                f"an object from another rank was not signed with the secret of the run: give all ranks the same "
                f"{SECRET}, or another program writes to the ranks' connections"
            )
        return pickle.loads(content)
