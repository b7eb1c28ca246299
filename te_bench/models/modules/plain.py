"""Check whether modules can be bypassed: fused kernels would compute the same, and nothing would observe it."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook


def are_plain(modules: Iterable[nn.Module], home: str = "te_bench.", *, frozen: bool = False) -> bool:
    """Return whether the modules compute as torch's and te's do, have no hooks, and are trained whole or not at all.

    home: a Python module whose classes count as te's: that of a self-describing model. frozen: the caller does not need
    all gradients, so some parameters may be frozen.
    """
    return not _has_any_global_hook() and all(_is_plain(module, home, frozen) for module in modules)


def why_not_plain(modules: Iterable[tuple[str, nn.Module]], home: str = "te_bench.") -> str:
    """Return why the named modules are not plain."""
    if _has_any_global_hook():
        return "a hook listens to every module (torch.nn.modules.module.register_module_*_hook)"
    for name, module in modules:
        if _is_plain(module, home):
            continue
        frozen = [own for own, p in module.named_parameters(recurse=False) if not p.requires_grad]
        if "forward" in module.__dict__:
            return f"{name}.forward was replaced"
        if not _is_known(module, home):
            return f"{name} is a {type(module).__qualname__}, whose forward is its own"
        return f"{name}.{frozen[0]} is frozen" if frozen and not has_hooks(module) else f"{name} has a hook"
    raise AssertionError("these modules are plain")


def has_hooks(module: nn.Module) -> bool:
    own = module.__dict__
    return any(own[f"_{which}_hooks"] for which in ("forward", "forward_pre", "backward", "backward_pre"))


def _is_known(module: nn.Module, home: str) -> bool:
    """Return whether a module's forward is torch's, te's or home's own, not a subclass's or a wrapper's."""
    where: str = type(module).forward.__module__
    return where.startswith(("torch.nn.", "te_bench.")) or where == home


def _is_plain(module: nn.Module, home: str, frozen: bool = False) -> bool:
    own = module.__dict__  # called for 145 modules in every eager pass of a fused GPT-2
    if not _is_known(module, home):
        return False
    if "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return False
    if own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    parameters = own["_parameters"]
    if frozen or not parameters or not torch.is_grad_enabled():
        return True
    return all(p is None or p.requires_grad for p in parameters.values())
