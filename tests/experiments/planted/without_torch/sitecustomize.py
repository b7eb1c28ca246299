"""A torch that is none, whose import takes no two seconds: for trials that compute nothing."""

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

torch: Any = types.ModuleType("torch")
torch.__spec__ = ModuleSpec("torch", None)
torch.OutOfMemoryError = MemoryError
torch.Tensor = type("Tensor", (), {})  # which SciPy asks for
torch.set_num_threads = lambda threads: None
torch.cuda = types.SimpleNamespace(is_initialized=lambda: False)
sys.modules["torch"] = torch
