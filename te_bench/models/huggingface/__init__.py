"""te-bench's kernels in models of transformers: its attn_implementation, and what te.convert puts into a model.

Importing it tells transformers of attn_implementation="te_bench" and "te_bench_fp8", where transformers is installed.
"""

from importlib.util import find_spec

if find_spec("transformers") is not None:
    from te_bench.models.huggingface.attention import register

    register()
