"""Formulas that say which mixes of parallelisms fit a model, and which of these is the fastest.

A model of P parameters is a transformer with P = 12 · layers · width² and width = 128 · layers.
Training needs 16 bytes per parameter: weights and gradients in 16 bit, and weights and Adam's two
moments in 32 bit. A step needs 6 operations per parameter and token. Computation hides whatever
communication it can. Activations don't count, because they are recomputed. A replica has at least
one sample.

Sources: S. Rajbhandari et al., "ZeRO" (2020), for memory and communication; D. Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), for tensor
parallelism and the bubble.
"""

from __future__ import annotations

from dataclasses import dataclass

_TENSOR = "tensor × data"
_PIPELINE = "pipeline × tensor × data"
NAMES = ("replicas", "ZeRO-2", "ZeRO-3", _TENSOR, _PIPELINE, "offload")
DOES_NOT_FIT = "does not fit"


#: Name → bytes on a device, and seconds of a step.
Mixes = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Machine:
    """A machine that a model is trained on.

    Attributes:
        memory, host: bytes of a device, and of the host's memory for each device.
        speed: operations per second of a device.
        node: devices of a node.
        inside, between, bus: bytes per second and device: within a node, between nodes, to the
        host.
        tokens, sequence: tokens of a step over all devices, and of one sample.
    """

    memory: float = 80e9
    host: float = 250e9
    speed: float = 400e12
    node: int = 8
    inside: float = 300e9
    between: float = 50e9
    bus: float = 50e9
    tokens: float = 4e6
    sequence: float = 4096


def estimates(parameters: float, devices: int, machine: Machine) -> Mixes:
    """Return for each mix the bytes on a device, and the seconds of a step.

    Raises:
        ValueError: no parameters or no devices.
    """
    if parameters <= 0 or devices < 1:
        raise ValueError(f"expected a model and a device, got {parameters} and {devices}")
    weights = 2.0 * parameters
    layers = max(1.0, (parameters / (12 * 128**2)) ** (1 / 3))
    work = 6 * parameters * machine.tokens / (devices * machine.speed)
    sizes = (weights, layers, work, devices, machine)
    mixes = _data_mixes(*sizes) | _tensor_mixes(*sizes)
    return {name: mixes[name] for name in NAMES if name in mixes}


def _data_mixes(weights: float, layers: float, work: float, n: int, m: Machine) -> Mixes:
    """Return the mixes in which each device has its own samples."""
    if n > m.tokens / m.sequence:
        return {}
    # A line longer than a node uses the slow network.
    wide = m.between if n > m.node else m.inside
    two_layers = 2 * weights / layers  # the weights of a layer and of the next one
    share = (n - 1) / n
    averaging = max(work, work / 3 + 2 * weights * share / wide)
    gathering = max(work, 3 * weights * share / wide)
    return {
        "replicas": (8 * weights, averaging),
        "ZeRO-2": (weights + 7 * weights / n + two_layers, averaging),
        "ZeRO-3": (8 * weights / n + 2 * two_layers, gathering),
        # Each device keeps its shard in the host's memory, and gets the other shards by network.
        "offload": (4 * two_layers, max(gathering, 3 * weights / n / m.bus)),
    }


def _tensor_mixes(weights: float, layers: float, work: float, n: int, m: Machine) -> Mixes:
    """Return the mixes in which the devices of a node share each layer."""
    mixes: Mixes = {}
    samples = m.tokens / m.sequence
    t = min(n, m.node)  # the tensor axis is a node
    width = 128 * layers
    replicas = n / t
    cut = 8 * layers * m.tokens / replicas * width * 2 * (t - 1) / t / m.inside
    data = 2 * weights / t / m.between if replicas > 1 else 0.0
    if replicas <= samples:
        mixes[_TENSOR] = _sharded(weights / t, replicas), max(work, work / 3 + data) + cut

    def pipelined(stages: int) -> tuple[float, float]:
        # One sample is a microbatch. Computation hides a stage's messages.
        microbatches = samples / (replicas / stages)
        full = (work + cut) * (microbatches + stages - 1) / microbatches
        held = _sharded(weights / t / stages, replicas / stages)
        return held, full + 2 * weights / t / stages / m.between / 3

    numbers = [stages for stages in (2, 4, 8, 16, 32, 64) if stages <= min(replicas, layers)]
    pipelines = [pipelined(stages) for stages in numbers if replicas / stages <= samples]
    if pipelines:
        # The best pipeline is the fastest that fits, or else the fastest of all.
        mixes[_PIPELINE] = max(pipelines, key=lambda mix: (mix[0] <= m.memory, -mix[1]))
    return mixes


def _sharded(weights: float, replicas: float) -> float:
    """Return the bytes of weights and gradients, and of the optimizer state that replicas share."""
    return 2 * weights + 6 * weights / replicas


def fastest(parameters: float, devices: int, machine: Machine) -> str:
    """Return the fastest mix that fits; the simplest comes first if several are equally fast."""
    mixes = estimates(parameters, devices, machine)
    if 16 * parameters / devices > machine.host:
        mixes.pop("offload", None)
    fitting = {name: seconds for name, (held, seconds) in mixes.items() if held <= machine.memory}
    if not fitting:
        return DOES_NOT_FIT
    least = min(fitting.values())
    return next(name for name, seconds in fitting.items() if seconds <= 1.01 * least)
