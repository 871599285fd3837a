"""Content that can be verified: any block of a file follows from the file's name and the block's number.

SHAKE-128 yields one mebibyte per name. A block is its own mask, followed by that mebibyte, rotated by an offset that
depends on the number. So a check finds a block that is wrong, misplaced, from another file or truncated. Comparing a
block costs two copies of it: a replay's time must be the storage's time.
"""

from __future__ import annotations

import hashlib
import os

BLOCK_BYTES = 1 << 20
MASK_BYTES = 4096


class Content:
    """The content of one file, from its name."""

    def __init__(self, name: str) -> None:
        self._name = os.fsencode(name)
        self._twice: bytes | None = None

    def block(self, number: int, length: int = BLOCK_BYTES) -> bytes:
        """The first `length` bytes of a block."""
        mask, begin = self._place(number)
        if length <= MASK_BYTES:
            return mask[:length]
        return b"".join((mask, memoryview(self._base())[begin : begin + length - MASK_BYTES]))

    def is_block(self, found: bytes, number: int, length: int) -> bool:
        if len(found) != length:
            return False
        mask, begin = self._place(number)
        if length <= MASK_BYTES:
            return found == mask[:length]
        return found.startswith(mask) and found[MASK_BYTES:] == self._base()[begin : begin + length - MASK_BYTES]

    def _place(self, number: int) -> tuple[bytes, int]:
        """Its mask, and the offset in the mebibyte at which the rest begins."""
        drawn = hashlib.shake_128(b"%d %s" % (number, self._name)).digest(MASK_BYTES + 8)
        return drawn[:MASK_BYTES], int.from_bytes(drawn[MASK_BYTES:], "little") % BLOCK_BYTES

    def _base(self) -> bytes:
        if self._twice is None:
            self._twice = hashlib.shake_128(self._name).digest(BLOCK_BYTES) * 2
        return self._twice


def write(path: str, name: str, size: int) -> None:
    content = Content(name)
    with open(path, "wb", buffering=0) as stream:
        for number, length in _blocks(size):
            block = content.block(number, length)
            while block:
                block = block[stream.write(block) :]


def verify(path: str, name: str, size: int) -> str | None:
    """Reads the whole file; returns what is wrong with it."""
    content = Content(name)
    try:
        with open(path, "rb", buffering=0) as stream:
            for number, length in _blocks(size):
                found = _exactly(stream.fileno(), length)
                if not content.is_block(found, number, length):
                    short = f"only {len(found)} bytes of it are there" if len(found) < length else "its bytes are wrong"
                    return f"{path!r}: block {number}: {short}"
            if stream.read(1):
                return f"{path!r} is longer than {size} bytes"
    except OSError as error:
        return f"{path!r}: {error.strerror}"
    return None


def _blocks(size: int) -> list[tuple[int, int]]:
    """Number and length of each block."""
    return [(at // BLOCK_BYTES, min(BLOCK_BYTES, size - at)) for at in range(0, size, BLOCK_BYTES)]


def _exactly(descriptor: int, length: int) -> bytes:
    parts = []
    while length and (part := os.read(descriptor, length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
