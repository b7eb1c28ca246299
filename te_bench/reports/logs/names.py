"""Find a log's validation loss and its training loss by the names that trainers give them."""

import re

#: A log's validation loss is the first of these names that it has. Any other mark between words is read as an underscore.
VALIDATION = (
    "val_loss", "valid_loss", "validation_loss", "eval_loss", "dev_loss", "loss_val", "loss_valid", "loss_validation",
    "loss_eval", "lm_loss_validation", "validation_metrics_loss", "val_loss_epoch",
)  # fmt: skip
#: The same for the training loss.
TRAINING = (
    "loss", "train_loss", "training_loss", "loss_train", "loss_training", "lm_loss", "loss_metrics_global_avg_loss",
    "train_loss_step", "train_loss_epoch", "reduced_train_loss",
)  # fmt: skip
#: Words in the names of metrics of which more is better.
MORE_IS_BETTER = frozenset(
    ("acc", "accuracy", "bleu", "f1", "mfu", "precision", "recall", "reward", "rouge", "throughput")
)

#: What tells a pair's runs apart in their names, with the marks that join it to the rest.
_WORDS = (
    r"bf16|bfloat16|fp16|float16|tf32|fp32|float32|fp8|float8|mxfp8|fp4|float4|mxfp4|nvfp4|e4m3|e5m2|te|transformer_engine"
    "|baseline|candidate|control"
)
_SIDE = re.compile(
    rf"[-_. ]+(?:{_WORDS})(?![a-z\d])|/(?:{_WORDS})$|(?<![a-z\d])(?:{_WORDS})(?:[-_ /]+|\.(?=[^/]*\.)|$)", re.IGNORECASE
)


def plain(name: str) -> str:
    """Return the name in lower case, its words joined by underscores: "Eval/Loss" is eval_loss."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def is_loss(name: str) -> bool:
    """Return whether the name is a loss's."""
    return "loss" in name.lower()


def is_held_out(name: str) -> bool:
    """Return whether the name is a validation loss's, of one set (as in VALIDATION) or of one of several."""
    return is_loss(name) and re.search(r"(?:^|_)(?:val|valid|validation|eval|dev)(?:_|$)", plain(name)) is not None


def is_trained(name: str) -> bool:
    """Return whether the name is clearly a training loss's; "loss" alone is not."""
    return plain(name) in TRAINING and plain(name) != "loss"


def precision(name: str) -> str | None:
    """Return the precision in a name, low or high; None if it has none or both."""
    low, high = (
        re.search(words, name.lower()) is not None for words in (r"fp[48]|float[48]|e4m3", r"bf16|bfloat|fp16|fp32")
    )
    return None if low == high else "low" if low else "high"


def without_side(name: str) -> str:
    """Return a run's name without its precision or side, which is its partner's too: run0.log of bf16_run0.log."""
    return _SIDE.sub("", name)


def alike(one: str | None, other: str | None) -> bool | None:
    """Return whether two names mean the same loss, or None if that is unknown; a source without a name has None."""
    if one is None or other is None or "value" in (names := {plain(one), plain(other)}):
        return None
    if len(names) == 1 or names <= set(VALIDATION) or (is_trained(one) and is_trained(other)):
        return True
    kinds = [(is_loss(name), is_held_out(name), is_trained(name)) for name in (one, other)]
    apart = kinds[0][0] != kinds[1][0] or {(True, False), (False, True)} <= {kind[1:] for kind in kinds}
    return False if apart else None
