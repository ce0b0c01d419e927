"""What a blocking call returns that was over at once."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Work


class DoneWork(Work):
    """A communication that was complete when its call returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """It is over."""
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """It is over."""
        return True

    is_success = is_completed


#: One for all of them.
DONE = DoneWork()
