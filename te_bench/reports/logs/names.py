"""Which of a log's losses is the validation loss and which the training loss, by the names that trainers give them."""

import re

#: The first of these that a log has is its validation loss. Every mark between words is read as one underscore.
VALIDATION = (
    "val_loss", "valid_loss", "validation_loss", "eval_loss", "dev_loss", "loss_val", "loss_valid", "loss_validation",
    "loss_eval", "lm_loss_validation", "validation_metrics_loss", "val_loss_epoch",
)  # fmt: skip
#: The same of the training loss.
TRAINING = (
    "loss", "train_loss", "training_loss", "loss_train", "loss_training", "lm_loss", "loss_metrics_global_avg_loss",
    "train_loss_step", "train_loss_epoch", "reduced_train_loss",
)  # fmt: skip


def plain(name: str) -> str:
    """The name in lower case, its words joined by one underscore: "Eval/Loss" is eval_loss."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def is_loss(name: str) -> bool:
    """Whether the name speaks of a loss."""
    return "loss" in name.lower()


def is_held_out(name: str) -> bool:
    """Whether the name speaks of a loss on data that is not trained on, be it one of VALIDATION or of several sets."""
    return is_loss(name) and re.search(r"(?:^|_)(?:val|valid|validation|eval|dev)(?:_|$)", plain(name)) is not None


def is_trained(name: str) -> bool:
    """Whether the name says that the loss is of training batches; "loss" does not."""
    return plain(name) in TRAINING and plain(name) != "loss"


def alike(one: str | None, other: str | None) -> bool | None:
    """Whether two names, None where a source has none, mean one loss; None where they do not tell."""
    if one is None or other is None or "value" in (names := {plain(one), plain(other)}):
        return None
    if len(names) == 1 or names <= set(VALIDATION) or (is_trained(one) and is_trained(other)):
        return True
    kinds = [(is_loss(name), is_held_out(name), is_trained(name)) for name in (one, other)]
    apart = kinds[0][0] != kinds[1][0] or {(True, False), (False, True)} <= {kind[1:] for kind in kinds}
    return False if apart else None
