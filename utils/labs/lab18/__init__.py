"""Lab 18: the clinic, five instruments for sick programs, and a ward of thirty."""

from typing import TYPE_CHECKING

from utils.labs import opened

if TYPE_CHECKING:
    from .checks import *

__getattr__, __dir__ = opened(__name__)
