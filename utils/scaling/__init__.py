"""Did it get faster? Measured runs, the laws fitted to them, and predictions.

alpha_beta   α–β: what a message of n bytes costs
laws         Amdahl (1967), Gustafson (1988): fits with uncertainties
runs         a training script on ranks of its own, started by mpiexec: JSON in hand
batch        the same on a cluster: one Slurm job for a series of rank counts
forecast     the time of a training step on machines that are not here
"""

from utils.scaling.alpha_beta import AlphaBeta, fit_alpha_beta

__all__ = ["AlphaBeta", "fit_alpha_beta"]
