"""Checks of lab 18: the ward."""

from .ward_checks import *  # noqa: F403
