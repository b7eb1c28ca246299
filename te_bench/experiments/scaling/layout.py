"""The input of a prediction: the work of a step, its layout over GPUs, and the speed of one GPU. No torch."""

from dataclasses import dataclass

from te_bench.experiments import peaks
from te_bench.experiments.scaling.collectives import Group
from te_bench.models.configs import DecoderConfig

MODES = ("ddp", "fsdp2", "tp", "fsdp2+tp", "hsdp")
PRECISIONS = ("bf16", "fp8")
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU to predict for. machine: its NVML name; memory: bytes, by NVIDIA's data sheet."""

    name: str
    machine: str
    memory: float

    def peak(self, precision: str) -> float:
        """Return dense FLOP/s."""
        found = peaks.peak(self.machine, precision)
        assert found is not None
        return found


GPUS = {
    "h100": Gpu(name="H100 SXM", machine="NVIDIA H100 80GB HBM3", memory=80e9),
    "h200": Gpu(name="H200 SXM", machine="NVIDIA H200", memory=141e9),
}
#: Bytes/s of torch's fused AdamW on an H100, by the records of results/h100/speed-llama3-1b; 2.7 TB/s on an H200.
UPDATES = 2.6e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """FLOP/s of one GPU over a whole step without its update: for work in bf16, and in FP8."""

    bf16: float
    fp8: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A step: `batch` sequences a micro-batch for each copy of the model, block_size tokens each.

    recompute: the part of a layer's forward pass that the backward pass repeats: none, every second matrix product
    (torchtitan's selective checkpointing) or all. reduce_bytes: bytes of a gradient's element when it is reduced.
    """

    config: DecoderConfig
    batch: int
    precision: str
    micro_batches: int = 1
    recompute: str = "none"
    reduce_bytes: int = 4

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, for one copy of the model."""
        return self.batch * self.config.block_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a step is divided: by mode, with tp ranks a layer, pp stages of `chunks` parts each and cp parts a sequence.

    sliced: tensor parallelism overlaps communication with its GEMMs (torch's async TP).
    """

    mode: str
    world: int
    gpus_per_node: int = 8
    link: float  # bytes a second from one GPU to other nodes
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    cp: int = 1
    sliced: bool = False

    @property
    def copies(self) -> int:
        """Number of copies of the model, each with a batch of its own."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def _near(self) -> int:
        """Number of ranks in a node that hold the same part of the model."""
        return max(1, min(self.gpus_per_node, self.world) // self.tp)

    def group(self, ranks: int, local: int) -> Group:
        return Group(ranks=ranks, local=min(ranks, local), link=self.link)

    @property
    def tensor(self) -> Group:
        return self.group(self.tp, self.gpus_per_node)

    @property
    def shards(self) -> Group:
        """The ranks over which weights, gradients and states are sharded."""
        if self.mode in ("ddp", "tp"):
            return self.group(1, 1)
        same = self.copies * self.cp
        return self.group(min(same, self._near) if self.mode == "hsdp" else same, self._near)

    @property
    def replicas(self) -> Group:
        """The ranks over which gradients are all-reduced, instead of or after sharding."""
        if self.mode == "ddp":
            return self.group(self.copies, self._near)
        if self.mode == "hsdp":
            return self.group(self.copies // self.shards.ranks, 1)
        return self.group(1, 1)
