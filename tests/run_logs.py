"""Small logs like those of other people's trainers, each of one run: losses at step 0, 10, ... 100."""

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from te_bench.reports.logs.formats.tensorboard import crc32c, masked

STEPS = tuple(range(0, 101, 10))


def course(end: float, noise: float = 0.0) -> list[float]:
    """A loss by step that has come to rest at `end`, with another noise on every other step."""
    return [round(end + 5 * 0.1 ** (step / 10) + (-1) ** n * noise, 4) for n, step in enumerate(STEPS)]


def nanogpt(path: Path, end: float) -> Path:
    lines = ["number of parameters: 10.65M", "compiling the model..."]
    for step, val, train in zip(STEPS, course(end), course(end - 0.5, 0.01), strict=True):
        lines.append(f"step {step}: train loss {val - 0.2:.4f}, val loss {val:.4f}")
        lines.append(f"iter {step}: loss {train:.4f}, time 35392.12ms, mfu -100.00%")
    return written(path, "\n".join(lines) + "\n")


def torchtitan(path: Path, end: float) -> Path:
    """In colours, as it prints to a terminal."""
    lines = ["[rank0]:[titan] 2025-09-11 14:08:37,102 - root - INFO - Training starts at step 1"]
    for step, val, train in zip(STEPS, course(end), course(end - 0.5, 0.01), strict=True):
        head = "[rank0]:[titan] 2025-09-11 14:08:38,211 - root - INFO - "
        lines.append(
            f"{head}\x1b[31mstep: {step:2}  \x1b[32mloss: {train:7.4f}  \x1b[38;2;180;60;0mgrad_norm:  1.2345  "
            "\x1b[36mmemory:  1.47GiB(1.55%)  \x1b[34mtps: 1,234  \x1b[36mtflops: 0.51  \x1b[35mmfu: 0.16%\x1b[39m"
        )
        lines.append(f"{head}\x1b[33mvalidate step: {step:2}  \x1b[32mloss: {val:7.4f}  \x1b[36mmemory:  1.5GiB(2%)")
    return written(path, "\n".join(lines) + "\n")


def megatron(path: Path, end: float) -> Path:
    lines = ["------------------------ arguments ------------------------", "  lr ........ 0.0006"]
    for step, val, train in zip(STEPS, course(end), course(end - 0.5, 0.01), strict=True):
        lines.append(
            f" [2025-09-11 14:08:38] iteration {step:8d}/     100 | consumed samples:  {step * 256:11d} | elapsed time per "
            f"iteration (ms): 512.1 | learning rate: 1.500000E-04 | global batch size:   256 | lm loss: {train:.6E} | "
            "loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
        lines.append("-" * 80)
        lines.append(f" validation loss at iteration {step} | lm loss value: {val:.6E} | lm loss PPL: 2.480000E+01 | ")
    lines.append(
        " validation loss at iteration 100 on test set | lm loss value: 9.000000E+00 | lm loss PPL: 8.1E+03 | "
    )
    return written(path, "\n".join(lines) + "\n")


def huggingface(path: Path, end: float) -> Path:
    history: list[dict[str, float]] = []
    for step, val, train in zip(STEPS, course(end), course(end - 0.5, 0.01), strict=True):
        history.append({"epoch": step / 100, "grad_norm": 1.5, "learning_rate": 1e-4, "loss": train, "step": step})
        history.append({"epoch": step / 100, "eval_loss": val, "eval_runtime": 1.2, "step": step})
    history.append({"epoch": 1.0, "total_flos": 1e12, "train_loss": 4.2, "train_runtime": 9.0, "step": 100})
    state = {"best_metric": None, "global_step": 100, "log_history": history, "max_steps": 100}
    return written(path / "trainer_state.json", json.dumps(state, indent=2))


def wandb_rows(end: float) -> list[dict[str, float]]:
    both = zip(STEPS, course(end), course(end - 0.5, 0.01), strict=True)
    return [{"_step": n, "iter": s, "val/loss": v, "train/loss": t} for n, (s, v, t) in enumerate(both)]


def wandb_jsonl(path: Path, end: float) -> Path:
    return written(path / "wandb-history.jsonl", "".join(json.dumps(row) + "\n" for row in wandb_rows(end)))


def wandb_csv(path: Path, end: float) -> Path:
    """As pandas writes Run.history()."""
    rows = wandb_rows(end)
    lines = [",".join(["", *rows[0]]), *(",".join(map(str, [n, *row.values()])) for n, row in enumerate(rows))]
    return written(path, "\n".join(lines) + "\n")


def wandb_binary(path: Path, end: float, seed: int) -> Path:
    """Its records are so long that they go over the blocks' ends."""
    run = message(17, message(8, b"a name") + message(4, message(1, item("lr", 0.1)) + message(1, item("seed", seed))))
    records = [run]
    for row in wandb_rows(end):
        items = b"".join(message(1, item(key, value)) for key, value in row.items())
        records.append(message(2, items + message(1, item("sample", "x" * 9000))))
    return written(path / "run-a1b2c3.wandb", leveldb(records))


def item(key: str, value: object) -> bytes:
    return message(1, key.encode()) + message(16, json.dumps(value).encode())


def message(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def leveldb(records: Sequence[bytes], block: int = 2**15) -> bytes:
    out = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
    for record in records:
        begun, rest = False, record
        while rest or not begun:
            room = block - len(out) % block
            if room < 7:
                out += bytes(room)
                continue
            part, rest = rest[: room - 7], rest[room - 7 :]
            kind = (1, 2, 4, 3)[2 * begun + bool(rest)]
            out += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            begun = True
    return out


def tensorboard(path: Path, end: float, names: tuple[str, str] = ("eval/loss", "train/loss")) -> Path:
    out = b""
    for step, *losses in zip(STEPS, course(end), course(end - 0.5, 0.01), strict=True):
        for tag, loss in zip(names, losses, strict=True):
            value = message(1, tag.encode()) + varint(2 << 3 | 5) + struct.pack("<f", loss)
            out += tfrecord(
                varint(1 << 3 | 1) + bytes(8) + varint(2 << 3) + varint(step) + message(5, message(1, value))
            )
    return written(path / "events.out.tfevents.1700000000.host.1.0", out)


def tfrecord(data: bytes) -> bytes:
    size = struct.pack("<Q", len(data))
    return size + struct.pack("<I", masked(crc32c(size))) + data + struct.pack("<I", masked(crc32c(data)))


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
