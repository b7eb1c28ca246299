"""resize_token_embeddings of transformers' models whose head is a te.Linear: they resize nothing but an nn.Linear."""

from typing import Any

from torch import nn

from te_bench.models.modules.linear import Linear


class Resizing:
    """A model's own resize_token_embeddings, with an nn.Linear in the head's place while it runs.

    The head stays the module that it was, with hooks and scales; its parameters are new ones.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, head = self.model, self.model.get_output_embeddings()
        resize = type(model).resize_token_embeddings
        if not isinstance(head, Linear):
            return resize(model, *args, **kwargs)
        options: dict[str, Any] = {"bias": head.bias is not None, "device": "meta", "dtype": head.weight.dtype}
        plain: Any = nn.Linear(head.in_features, head.out_features, **options)  # around the same parameters
        plain.weight, plain.bias = head.weight, head.bias
        model.set_output_embeddings(plain)
        try:
            return resize(model, *args, **kwargs)
        finally:
            made = model.get_output_embeddings()
            head.resize(made.weight, made.bias)
            model.set_output_embeddings(head)
