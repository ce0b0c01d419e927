"""Lab 14: the capstone, in which teams write a training scheme."""

from typing import TYPE_CHECKING

from utils.labs import opened

if TYPE_CHECKING:
    from .capstone import *

__getattr__, __dir__ = opened(__name__, "capstone")
