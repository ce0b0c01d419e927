"""The word by which a rank announces a collective: a *fingerprint* of 64 bits.

=========  ======================================================================================
bits       meaning
=========  ======================================================================================
63         the rank has called the collective
62         it waits in a blocking call
61 to 42   the number of the collective in its group, modulo 2²⁰
41 to 0    the signature of the call: what has to be equal on all ranks
=========  ======================================================================================

No other module knows this layout, and no bit is free: one more bit takes one of the number or of
the signature. If all ranks make the same call in the same way, their words are equal. The callers
of :func:`alike` compare whole words, and miss their usual case if ranks differ in a bit. A mask in
:func:`alike` is not enough, as it sees only this rank's word: PROTOCOL.md says how to announce one
more bit. Nothing here needs torch or MPI.
"""

from __future__ import annotations

import functools
import hashlib

_CALLED, _BLOCKING = 1 << 63, 1 << 62
_NUMBER_AT = 42
#: The bits of the number, and the number of the last collective before it begins at 0 again.
NUMBER = (1 << 20) - 1
_SIGNATURE = (1 << _NUMBER_AT) - 1


@functools.lru_cache(maxsize=65_536)
def signature(key: tuple[object, ...]) -> int:
    """Return the bits that stand for what has to be equal; the same in every process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SIGNATURE


def fingerprint(number: int, code: int, blocking: bool) -> int:
    """Return the word for collective ``number`` with the signature ``code``."""
    return _CALLED | (_BLOCKING if blocking else 0) | (number & NUMBER) << _NUMBER_AT | code


def numbered(unnumbered: int, number: int) -> int:
    """Return the fingerprint of collective 0, ``unnumbered``, for collective ``number``."""
    return unnumbered | (number & NUMBER) << _NUMBER_AT


def as_blocking(word: int) -> int:
    """Return the fingerprint of the same call in which the rank waits."""
    return word | _BLOCKING


def refusal(word: int) -> int:
    """Return the word of a rank that never begins this collective: no call has its signature."""
    return word ^ _SIGNATURE


def alike(word: int, ranks: int) -> list[int]:
    """Return the words of all ranks if they make the same call in the same way."""
    return [word] * ranks


def is_there(word: int, number: int, mine: int) -> bool:
    """Whether a rank has announced collective ``number``, and has not refused the call ``mine``."""
    return bool(
        word & _CALLED
        and (word >> _NUMBER_AT & NUMBER) == number & NUMBER
        and (word ^ mine) & _SIGNATURE != _SIGNATURE
    )


def is_same_call(word: int, mine: int) -> bool:
    """Whether the signatures are equal."""
    return not (word ^ mine) & _SIGNATURE


def is_blocking(word: int) -> bool:
    """Whether the rank waits in a blocking call."""
    return bool(word & _BLOCKING)
