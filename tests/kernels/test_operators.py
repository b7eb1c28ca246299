"""All custom operators of te_bench."""

import importlib
import pkgutil
from typing import Any

import pytest
import torch

import te_bench.kernels
from te_bench.kernels import activation, norm


def test_no_argument_that_an_operator_writes_to_has_a_default() -> None:
    """torch leaves out what equals a default, and before 2.12 (pytorch issue 176078) looks there for what was written to."""
    for module in pkgutil.walk_packages(te_bench.kernels.__path__, "te_bench.kernels."):
        importlib.import_module(module.name)  # a rival's package is imported where it is used
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("te_bench::")]
    assert len(schemas) > 20
    written = [
        f"{schema.name}: {argument.name}"
        for schema in schemas
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.has_default_value()
    ]
    assert written == []


ROWS, COLUMNS = 6, 16
VECTOR = torch.ones(COLUMNS)
TURNED = torch.ones(COLUMNS, ROWS).t()
CAST = (torch.ones(()), torch.float8_e4m3fn, True, True)
OF_NORM = (TURNED, VECTOR, torch.ones(ROWS), torch.ones(ROWS), False)
CALLS: dict[str, tuple[Any, ...]] = {
    "activation_forward": (TURNED, "gelu"),
    "activation_forward_quantized": (TURNED, "gelu", *CAST, None, None),
    "activation_backward": (TURNED, TURNED, "gelu"),
    "activation_backward_quantized": (TURNED, TURNED, "gelu", *CAST, None, None, None),
    "norm_forward": (TURNED, VECTOR, VECTOR, 1e-5, False, "layernorm"),
    "norm_backward": (TURNED, *OF_NORM, None),
    "norm_backward_rounded": (TURNED, *OF_NORM, TURNED, True, torch.bfloat16, None, None, None),
    "norm_add_forward": (
        TURNED, TURNED, VECTOR, None, 1e-5, False, "rmsnorm", torch.bfloat16, None, None, False, False, None, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_fake_has_the_strides_of_the_result_of_turned_inputs(name: str) -> None:
    """Otherwise compiled code stops at its own assertion of strides."""
    for family in (activation, norm):
        family.load("triton")  # defines the operators
    torch.library.opcheck(getattr(torch.ops.te_bench, name), CALLS[name], test_utils="test_faketensor")
