"""Every tolerance of the checks: how far from the reference in float64 a right result may be.

The rule is FlashAttention's: as far as FACTOR times what a yardstick errs at the same precision, and a floor.
"""

import torch

# Each tensor as a whole.
FACTOR = 2.0
#: Unit round-off of the compute format, and the floor.
EPSILON = {"fp32": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-8}
FLOOR = {precision: 4 * unit for precision, unit in EPSILON.items()}
#: Of an output's largest element: units of float32's accumulation.
ACCUMULATED = 16 * 2.0**-23
#: Of the loss, a mean over so many tokens that rounding cancels: half of ln(50304) / ln(50257) - 1, what padding in the
#: softmax would add, and for FP8 (one rounding of a weight touches every token) what the emulation was seen to stray.
LOSS_FLOOR = {"fp32": 4e-7, "bf16": 4e-5, "fp16": 4e-5, "fp8": 1e-3}

#: A gradient of which float64 says that it is nothing but the yardstick's rounding: so many times as much of it.
NOISE_FACTOR = 4.0

# All tensors together, in FP8: it rounds so coarsely that a wrong format hides below FACTOR in any one of them.
#: The geometric mean of all tensors' error ratios to the emulation. Right steps: 0.96 to 1.06 (tiny GPT, three shapes, 10
#: seeds each, single tensors up to 1.46). E5M2 for inputs alone 1.15 or more, for weights 1.20, for both 1.35; no scale
#: 1.24; a doubled scale 1.48.
FP8_OVERALL = 1.12
#: Where it is less, the step was not computed in FP8: bf16 0.07; E4M3 gradients, which is legal, 0.70.
FP8_LEAST = 0.5

# The scale of each tensor.
#: It may differ from the yardstick's by so many standard errors of the yardstick's own, as checks.rounding estimates it.
#: That is four to five of their difference: each has its own rounding, and rows and columns do not err quite apart.
SCALE_SIGMAS = 8.0
#: And by so much: what kernels may shrink without being wrong. FP8's products may be summed up in 14 bits, cut off.
SCALE_FLOOR = {"fp32": 2.0**-21, "bf16": 2e-3, "fp16": 2e-3, "fp8": 1e-2}

# Each row and each column.
#: It may err as much as the yardstick's, and so much again.
ROW_FACTOR = 2.0
#: Of a row of w elements whose error is normal, the norm exceeds 1 + TAIL / sqrt(2 w) times its mean once in 10^10 rows.
TAIL = 6.5
#: Of a row's own norm, beside: one large element decides over it, and rounding moves that one by half a step. FP8's step is
#: E5M2's, a gradient's; the others' is four units of round-off.
ROW_FLOOR = {"fp32": 2.0**-21, "bf16": 2.0**-6, "fp16": 2.0**-9, "fp8": 2.0**-3}
#: A row of attention may err so many times as much as the yardstick's: what errs by chance is 5 times the mean at most, and
#: what sees the wrong keys a hundred times.
ATTENTION_ROWS = 8.0

# A single GEMM, and a head with its loss.
#: Of a GEMM's largest element, beside FACTOR: float32's sums in another order; FP8's on a tensor core, of 14 bits for 128
#: products ("promoted") or for all of K ("fast").
GEMM_FLOOR = {"float32": 1e-6, "promoted": 5e-4, "fast": 2e-3}
#: Of a head's loss, a mean over n rows: so many times the unit of round-off / sqrt(n), four standard deviations of what
#: rounding its logits, of about 1, does to it.
HEAD_LOSS_SIGMAS = 4
#: Of the largest element of a head's gradient: units of round-off.
HEAD_GRADIENT_UNITS = 2

#: Of what is resident on a CPU right after a peak was read: pages may come in between, and the kernel counts in batches.
RESIDENT = 0.9

# Whole steps.
#: All gradients of two passes with the same state and random numbers differ by sums in another order, and by what these
#: move across a rounding. A batch of which half is lost differs by 0.6 or more, copies of weights from before an update by
#: 0.2 or more.
AGAIN = 0.125
#: Where they differ by more, and two passes that train nothing do as well, at most by so much: in FP8 a sum in another
#: order may move a deep model's gradients by as much as FP8 rounds. Llama 3.2 1B's first ones differed by 0.18.
LOOSEST = 0.4
#: Of the way that two updates move a parameter, by the dtype of its moments: AdamW's float32 strays by 1e-6 of it, and the
#: second update reads moments that are rounded. A weight decay of 0.1 that is lost is 2e-3 at GPT-2's first weights.
MOVED = {
    torch.float64: 2.0**-12,
    torch.float32: 2.0**-12,
    torch.float16: 2.0**-8,
    torch.bfloat16: 2.0**-5,
    torch.float8_e4m3fn: 2.0**-2,
}

#: Where honest trials were seen to be within the limits of updates, of foretold losses and of what timed layers left. On
#: other devices nothing is held to these.
DEVICES = frozenset({"cpu", "cuda"})

#: A step's loss beside an evaluation's of the same weights and batch: the step may be compiled, and rounds elsewhere.
FORETOLD = 5e-3
#: Where the step has an FP8 head, and the evaluation a head in bf16.
FORETOLD_BY_FP8 = 2e-2

# What timed passes of a layer left.
#: Of the output, beside that of the pass that was checked: both round.
LEFT = 0.1
#: Of a gradient's scale, a pass's share of the sum of all: bf16's sum of 100 passes strays by so much where each adds less
#: than half a step. Passes that compute nothing take their whole share away.
SUMMED = 0.25
