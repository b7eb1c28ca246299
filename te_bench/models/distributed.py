"""`te.distributed.checkpoint`, as Transformer Engine has it there. Tensor parallelism te_bench has not."""

from te_bench.models.fp8 import checkpoint

__all__ = ["checkpoint"]
