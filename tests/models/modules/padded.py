"""The padded batch of Transformer Engine's README: aaa00, bb000, cccc0; True is padding."""

import torch

README = torch.tensor(
    [
        [False, False, False, True, True],
        [False, False, True, True, True],
        [False, False, False, False, True],
    ]
)[:, None, None, :]
LENGTHS = (3, 2, 4)
