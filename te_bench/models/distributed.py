"""`te.distributed.checkpoint`, as Transformer Engine has it there."""

from te_bench.models.fp8 import checkpoint

__all__ = ["checkpoint"]
