"""te-bench's kernels in transformers models: its attn_implementation, and the replacements of te.convert.

Importing it registers attn_implementation="te_bench" and "te_bench_fp8", if transformers is installed.
"""

from importlib.util import find_spec

if find_spec("transformers") is not None:
    from te_bench.models.huggingface.attention import register

    register()
