"""All custom operators of te_bench."""

import importlib
import pkgutil

import torch

import te_bench.kernels


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
