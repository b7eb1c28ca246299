"""te-bench: which attention kernel and which precision to train transformers with, with proof."""

__version__ = "0.1.0"
