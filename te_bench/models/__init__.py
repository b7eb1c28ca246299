"""Models, their data and their training. `import te_bench.models as te` will read like Transformer Engine.

gpt.GPT is the model, train.TrainStep trains it, checkpoint.load and checkpoint.save exchange weights with Hugging Face.
Nothing here imports torch: planning and reporting use te_bench.models.corpus without it.
"""
