"""What a quantiser must answer, in NumPy: tables of all the codes, written out from the formats' definition (no torch)."""

import numpy as np
import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {"e4m3": (E4M3, 4, 3, 448.0), "e5m2": (E5M2, 5, 2, 57344.0)}
NAN = 255  # what `codes` and `encode` answer for every NaN: its sign and payload are nobody's business


def table(exponent_bits: int, mantissa_bits: int, limit: float) -> list[tuple[float, int]]:
    """(value, code) of the finite non-negative numbers of a format, ascending. Micikevicius et al., arXiv:2209.05433."""
    bias = 2 ** (exponent_bits - 1) - 1
    found = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        if exponent == 0:
            value = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
        if value <= limit:
            found.append((value, code))
    return found


def encode(x: np.ndarray, name: str) -> np.ndarray:
    """The codes nearest to x, of two equally near ones the even one; beyond the largest, the largest; NAN for NaN."""
    _, e, m, limit = FORMATS[name]
    values = np.array([value for value, _ in table(e, m, limit)])
    middles = (values[1:] + values[:-1]) / 2
    size = np.nan_to_num(np.abs(x.astype(np.float64)), posinf=1e300)
    below, above = np.searchsorted(middles, size, "left"), np.searchsorted(middles, size, "right")
    code = np.where(below % 2 == 0, below, above)  # they differ at a middle only
    return np.where(np.isnan(x), NAN, code | np.where(np.signbit(x), 0x80, 0))


def codes(data: torch.Tensor) -> np.ndarray:
    found = data.cpu().view(torch.uint8).numpy().astype(np.int64)
    return np.where(data.float().isnan().cpu().numpy(), NAN, found)


def scale_of(x: np.ndarray, name: str, power_of_two: bool = False) -> np.float32:
    """limit / amax in float32; 1 where that is impossible."""
    amax = np.float32(np.abs(x).max())
    if not (np.isfinite(amax) and amax > 0):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = min(np.float32(FORMATS[name][3]) / amax, np.finfo(np.float32).max)
    return np.float32(2.0 ** (np.frexp(scale)[1] - 1)) if power_of_two else np.float32(scale)


def scales(x: np.ndarray, name: str, kind: str, power_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    """A scale for each element of x (M, N), and scale_inv in the shape that Quantized promises, one group at a time."""
    m, n = x.shape
    rows, columns = {"tensor": (m, n), "row": (1, n), "block1": (1, 128), "block128": (128, 128)}[kind]
    each = np.empty((m, n), np.float32)
    inverse = np.empty((-(-m // rows), -(-n // columns)), np.float32)
    for i in range(inverse.shape[0]):
        for j in range(inverse.shape[1]):
            group = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            each[group] = scale = scale_of(x[group], name, power_of_two)
            inverse[i, j] = np.float32(1) / scale
    return each, inverse.reshape({"tensor": (), "row": (m,)}.get(kind, inverse.shape))


def multiply(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x * scale


def tallies(x: np.ndarray, scale: np.ndarray, name: str) -> list[int]:
    """saturated, underflowed, nonfinite."""
    product = multiply(x, scale)
    finite = np.isfinite(x)
    saturated = finite & (np.abs(product) > FORMATS[name][3])
    underflowed = finite & (x != 0) & (encode(product, name) & 0x7F == 0)
    return [int(saturated.sum()), int(underflowed.sum()), int((~finite).sum())]
