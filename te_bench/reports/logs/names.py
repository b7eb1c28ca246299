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
    "train_loss_step", "train_loss_epoch",
)  # fmt: skip


def plain(name: str) -> str:
    """The name in lower case, its words joined by one underscore: "Eval/Loss" is eval_loss."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def is_loss(name: str) -> bool:
    """Whether the name speaks of a loss."""
    return "loss" in name.lower()
