"""A rank's share of a tensor, in several pieces, as torch.distributed.checkpoint writes and reads it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Chunk(NamedTuple):
    """A piece of the whole tensor, beginning at `offsets`; `own` is this rank's memory of it."""

    offsets: torch.Size
    own: Tensor


class Stored(Tensor):
    """A tensor with the whole tensor's size, of which this rank has chunks; loading fills their memory."""

    chunks: Sequence[Chunk]

    @staticmethod
    def __new__(cls, size: torch.Size, like: Tensor, chunks: Sequence[Chunk]) -> "Stored":
        made: Any = Tensor._make_wrapper_subclass(cls, size, dtype=like.dtype, device=like.device)
        made.chunks = chunks
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    # torch.distributed.checkpoint calls these names (torch.distributed._checkpointable).
    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(chunk.offsets, chunk.own.size()),
                    properties=TensorProperties.create_from_tensor(chunk.own),
                    size=self.size(),
                ),
            )
            for chunk in self.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(chunk.offsets, chunk.own.size()) for chunk in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(chunk.own for chunk in self.chunks if chunk.offsets == index.offset)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Stored({tuple(self.size())}, {len(self.chunks)} chunks)"

    @classmethod
    def __torch_dispatch__(cls, operator: Any, *_: Any) -> Any:
        raise ValueError(f"{operator}: a share of a tensor is written and read, not computed with")
