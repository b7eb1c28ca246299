"""Models, their data and their training. `import te_bench.models as te` will read like Transformer Engine.

Nothing here imports torch: planning and reporting use te_bench.models.corpus without it.
"""
