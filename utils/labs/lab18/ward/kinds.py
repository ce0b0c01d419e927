"""The classes of faults. A finding names one of them."""

from __future__ import annotations

#: The meaning of each class, by its name.
KINDS = {
    "skipped call": "A rank makes fewer calls than the others, or more of them.",
    "order of calls": "All ranks make the calls, but in an order in which they wait in a circle.",
    "wrong partner": "A call names a wrong group, source or destination.",
    "not waited for": "A tensor is used while a call in the background may still change it.",
    "missing reduction": "The part of one rank is reported as if it were the whole.",
    "wrong factor": "A sum or a mean has a wrong divisor or wrong weights.",
    "same samples": "Ranks or epochs get the same samples, although they shouldn't.",
    "replicas differ": "The ranks start from different weights, or change them in different ways.",
    "stale object": "An object still refers to something that the program has replaced.",
    "wrong mode": "The network trains when it should evaluate, or the reverse.",
    "uneven work": "A rank computes more than the others, which wait. All come to their end.",
    "needless communication": "The ranks call more often, or send more bytes, than they need to.",
    "kept alive": "Tensors that nobody needs stay in memory, because something refers to them.",
    "too much at once": "A rank allocates far more at once than its part of the work needs.",
    "bad input": "A rank meets an index, a number or an empty batch that its code can't handle.",
    "swallowed error": "The program catches an error, and goes on as if nothing had happened.",
}
