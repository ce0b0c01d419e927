"""The check that only people get a server: not root, and not the accounts of services."""

from __future__ import annotations

import pwd
from collections.abc import Callable
from typing import Any

from tornado.web import HTTPError


def refuse_system_account(name: str, minimum: int) -> None:
    """Raise HTTPError 403 if an account doesn't exist, or if its user id is below `minimum`."""
    try:
        number = pwd.getpwnam(name).pw_uid
    except KeyError:
        raise HTTPError(
            403, f"There is no account {name!r} on the hub's host. Ask your administrator for one."
        ) from None
    if number < minimum:
        raise HTTPError(
            403,
            f"{name!r} is an account of the system: its user id is {number}, and {minimum} is the "
            "lowest that may log in. Use your own account. (site.toml: minimum_uid)",
        )


def hook(minimum: int) -> Callable[[Any, Any, dict], dict]:
    """Return an `Authenticator.post_auth_hook` that refuses system accounts at log-in."""

    def after_log_in(authenticator: Any, handler: Any, model: dict) -> dict:
        refuse_system_account(model["name"], minimum)
        return model

    return after_log_in
