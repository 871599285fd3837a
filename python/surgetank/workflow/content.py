"""Content that can be verified: any block of a file follows from the file's name and the block's number.

One mebibyte is drawn from SHAKE-128 for each name; a block is that, exclusive-or a mask of its own. So a block that is wrong, in the
wrong place, of another file or cut short is found out, and making one costs less than a millisecond and no more memory than a few blocks.
"""

from __future__ import annotations

import hashlib
import os

BLOCK_BYTES = 1 << 20
MASK_BYTES = 4096


class Content:
    """Of one file, by its name."""

    def __init__(self, name: str) -> None:
        self._name = os.fsencode(name)
        self._base: int | None = None

    def block(self, number: int, length: int = BLOCK_BYTES) -> bytes:
        """The first `length` bytes of a block."""
        mask = hashlib.shake_128(b"%d %s" % (number, self._name)).digest(MASK_BYTES)
        if length <= MASK_BYTES:
            return mask[:length]
        if self._base is None:
            self._base = int.from_bytes(hashlib.shake_128(self._name).digest(BLOCK_BYTES), "little")
        masks = int.from_bytes(mask * (BLOCK_BYTES // MASK_BYTES), "little")
        # The first part is the mask itself, so that a short block is the beginning of a long one.
        whole = (self._base ^ masks).to_bytes(BLOCK_BYTES, "little")
        return (mask + whole[MASK_BYTES:])[:length]


def write(path: str, name: str, size: int) -> None:
    content = Content(name)
    with open(path, "wb", buffering=0) as stream:
        for number, length in _blocks(size):
            block = content.block(number, length)
            while block:
                block = block[stream.write(block) :]


def verify(path: str, name: str, size: int) -> str | None:
    """Reads all of a file; what is wrong with it."""
    content = Content(name)
    try:
        with open(path, "rb", buffering=0) as stream:
            for number, length in _blocks(size):
                found = _exactly(stream.fileno(), length)
                if found != content.block(number, length):
                    short = f"only {len(found)} bytes of it are there" if len(found) < length else "its bytes are wrong"
                    return f"{path!r}: block {number}: {short}"
            if stream.read(1):
                return f"{path!r} is longer than {size} bytes"
    except OSError as error:
        return f"{path!r}: {error.strerror}"
    return None


def _blocks(size: int) -> list[tuple[int, int]]:
    """Number and length of each."""
    return [(at // BLOCK_BYTES, min(BLOCK_BYTES, size - at)) for at in range(0, size, BLOCK_BYTES)]


def _exactly(descriptor: int, length: int) -> bytes:
    parts = []
    while length and (part := os.read(descriptor, length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
