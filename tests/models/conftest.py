"""Without a GPU, but for tests marked `gpu`."""

from on_cpu import on_the_cpu_unless_marked

__all__ = ["on_the_cpu_unless_marked"]
