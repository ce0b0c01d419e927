"""Lab 05: did it get faster? Speedup, laws and a forecast."""

from typing import TYPE_CHECKING

from utils.labs import opened

if TYPE_CHECKING:
    from .checks import *

__getattr__, __dir__ = opened(__name__)
