"""Lab 14: the capstone, a training scheme of one's own."""

from typing import TYPE_CHECKING

from utils.labs import opened

if TYPE_CHECKING:
    from .capstone import *

__getattr__, __dir__ = opened(__name__, "capstone")
