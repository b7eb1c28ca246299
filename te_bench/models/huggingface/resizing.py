"""Make resize_token_embeddings work for a head that is a te.Linear: transformers resizes only an nn.Linear."""

from typing import Any

from torch import nn

from te_bench.models.modules.linear import Linear


class Resizing:
    """A model's own resize_token_embeddings, run with an nn.Linear in the head's place.

    The head stays the same module, with hooks and scales, but gets new parameters.
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
