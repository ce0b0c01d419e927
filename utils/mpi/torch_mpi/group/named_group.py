"""What PyTorch asks a process group about itself, under the names that PyTorch uses."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup


class NamedGroup(ProcessGroup):
    """A process group that knows its rank, its members, its name and its description.

    Args:
        members: global ranks, in the order of the group.
        rank: this rank in the group.
    """

    def __init__(self, members: tuple[int, ...], rank: int):
        super().__init__(rank, len(members))
        self.members, self._rank = members, rank
        self._name = self._description = ""

    def getBackendName(self) -> str:  # noqa: D102  (PyTorch's name)
        return "mpi"

    def getRank(self) -> int:  # noqa: D102
        return self._rank

    def getSize(self) -> int:  # noqa: D102
        return len(self.members)

    def getGroupName(self) -> str:  # noqa: D102
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: D102
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: D102
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: D102
        self._description = description

    name, rank, size = getBackendName, getRank, getSize
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    # PyTorch asks a group for the backend of a device; this group is its own.
    supports_splitting, supports_coalescing = True, False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """PyTorch asks that of backends that split: the ranks are connected from the start."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """A rank outside of a new group has nothing to do: only its members make it."""

    def _get_backend(self, device: torch.device) -> NamedGroup:
        return self
