"""An example of data-parallel training on made-up data: `mpiexec -n 4 python train.py`."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def data(samples: int = 4096) -> TensorDataset:
    """Return points in the plane, labeled by whether they are inside the unit circle."""
    points = torch.randn(samples, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points.norm(dim=1) < 1).long())


def main() -> None:
    """Train on all ranks; rank 0 prints the loss and the accuracy."""
    torch.set_num_threads(1)
    dist.init_process_group("mpi")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(replica.parameters(), lr=0.02)
    samples = data()
    sampler = DistributedSampler(samples)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        right = torch.zeros(1)
        for points, labels in DataLoader(samples, batch_size=64, sampler=sampler):
            scores = replica(points)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(scores, labels).backward()
            optimizer.step()
            right += (scores.argmax(dim=1) == labels).sum()
        dist.all_reduce(right)
        if dist.get_rank() == 0:
            accuracy = right.item() / len(samples)
            print(f"epoch {epoch + 1}: accuracy {accuracy:.3f} on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
