"""What Triton and the assembler make for Hopper, or another GPU, of every kernel that a call launches; needs no GPU.

A child process does it, for Triton interprets or compiles from its import on. There a launch is compiled as the launcher
asks for it, arguments, constants and alignment included, and does not run. As a program: compiled.py MODULE NAME NAME ...,
MODULE.CALLS[NAME]() being the calls, for MODULE.CAPABILITIES[NAME], 90 where there is none.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib
import io
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: The assembler cannot keep a tensor core's products in flight, and waits for each: NVIDIA's C7510 to C7518.
SERIALISED = r"\(C751[0-8]\)"
#: A conversion between layouts of what is FP8 already: on Hopper Triton 3.6 gets garbage for that of a float32 tile.
EXCHANGED = r"ttg\.convert_layout .*: (tensor<\w+xf8\w+)"
#: Two more bytes of FP8, beside those that a register has.
PACKED = r"F2FP\.SATFINITE\.E[45]M[23]\.F32\.PACK_AB_MERGE_C (R\d+), [^;]*, (R\d+)(?:\.reuse)? ;"
SHARED = 227 * 1024  # bytes of a program, on sm_90
REGISTERS, WARPS = 65536, 64  # of a processor
INSTRUCTION = 16  # bytes
HOPPER = 90


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel, in the order of launches."""

    call: str
    kernel: str
    registers: int  # a thread
    spills: int  # bytes a thread, stored and loaded
    shared: int  # bytes a program
    warps: int
    warnings: tuple[str, ...]  # the assembler's
    ptx: str = dataclasses.field(repr=False)
    sass: str = dataclasses.field(repr=False)  # where there are tensor cores or FP8
    ttgir: str = dataclasses.field(repr=False)
    capability: int = HOPPER

    def count(self, instruction: str) -> int:
        """How many instructions of the SASS match the regular expression."""
        return len(re.findall(instruction, self.sass))

    @property
    def programs(self) -> int:
        """How many fit on a processor: registers, warps, and shared memory, of which each takes 1 KB more."""
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * 32 * self.warps)
        return min(by_registers, (SHARED + 1024) // (self.shared + 1024), WARPS // self.warps)

    def __str__(self) -> str:
        return (
            f"{self.call}: {self.kernel}: {self.registers} registers, {self.spills} bytes spilled, "
            f"{self.shared} bytes shared, {self.warps} warps, {self.programs} programs a processor"
            + "".join(f"\n  {warning}" for warning in self.warnings)
        )


def faults(made: Compiled, of_a_tile: int = 0) -> list[str]:
    """What no published kernel may have. of_a_tile: bytes spilled by what its loops, looked at apart, do not touch."""
    found = []
    if made.spills > of_a_tile:
        found.append(f"{made.spills} bytes spilled")
    found += [warning for warning in made.warnings if re.search(SERIALISED, warning)]
    if made.shared > SHARED:
        found.append(f"{made.shared} bytes shared > {SHARED}")
    found += [f"FP8 that changes its thread: {line}" for line in re.findall(EXCHANGED, made.ttgir)]
    found += [f"FP8 packed with what is none: {line}" for line in _mispacked(made.sass)]
    return found


def loops(kernel: Compiled) -> list[list[str]]:
    """The innermost loops with products: from an address to the branch back to it, waits that stand elsewhere included."""
    return _innermost(kernel, lambda lines: any("GMMA" in line for line in lines))


def _innermost(kernel: Compiled, is_loop: Callable[[list[str]], bool]) -> list[list[str]]:
    """Of the lines from an address to a branch back to it, those that are a loop and hold no other."""
    lines, found = kernel.sass.splitlines(), list[tuple[int, int]]()
    place = {int(re.findall(r"/\*([0-9a-f]+)\*/", line)[0], 16): at for at, line in enumerate(lines)}
    for at, line in enumerate(lines):
        back = re.search(r"\bBRA\b.*?(0x[0-9a-f]+) ;", line)
        to = place.get(int(back[1], 16), at + 1) if back else at + 1
        if to <= at and is_loop(lines[to:at]):
            found.append((to, at))
    inner = [(a, b) for a, b in found if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in found)]
    return [lines[a : b + 1] for a, b in inner]


def spilled_in_loops(kernel: Compiled) -> int:
    """Instructions in innermost loops that spill or fetch what was spilled.

    A branch back across the program's end comes from a wait that stands elsewhere, and makes no loop.
    """
    inner = _innermost(kernel, lambda lines: not count(lines, r"\b(EXIT|RET)\b"))
    return sum(count(loop, r"\b(STL|LDL)\b") for loop in inner)


def count(loop: list[str], instruction: str) -> int:
    return sum(bool(re.search(instruction, line)) for line in loop)


def _mispacked(sass: str) -> list[str]:
    """Packings onto what no packing has left in that register: ptxas 12.8 does so of four numbers known to be equal."""
    found, leaves = [], dict[str, bool]()
    for line in sass.splitlines():
        packing = re.search(PACKED, line)
        if packing and not leaves.get(packing[2]):
            found.append(line.strip())
        written = re.search(r"\*/ +(?:@!?U?P\d+ +)?([A-Z][\w.]*) R(\d+)\b", line)  # of a store that is a place: [R2]
        if written:
            wide = 4 if ".128" in written[1] else 2 if re.search(r"\.64|WIDE|CS2R", written[1]) else 1
            packs = ".F32.PACK_AB_MERGE_C" in written[1]
            leaves |= {f"R{int(written[2]) + i}": packs for i in range(wide)}
    return found


@functools.cache
def compiled(module: str, names: tuple[str, ...], folder: Path) -> list[Compiled]:
    """The kernels that module.CALLS[name]() launch, by a child, which imports torch and its compiler first: 3 s.

    AssertionError, with the child's words, where it fails. What is in folder already, from the same sources and options, is
    not compiled again.
    """
    own = Path(str(sys.modules[module].__file__)).parent
    paths = [str(Path(__file__).parent), str(own), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, __file__, module, *names], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"the compiling child ended with {done.returncode}: {done.stderr}"
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [Compiled(**line | {"warnings": tuple(line["warnings"])}) for line in lines]


def main(module: str, names: list[str]) -> None:
    from triton.runtime.jit import JITFunction

    gc.disable()  # an eighth of the time, for a compiler's objects are many and its process short
    loaded = vars(importlib.import_module(module))
    calls, capabilities = loaded["CALLS"], loaded.get("CAPABILITIES", {})
    asked: list[tuple[Any, Any]] = []
    made: list[tuple[Compiled, Any]] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        asked.append((kernel, (args, options)))

    JITFunction.run = run
    for name in names:
        asked.clear()
        calls[name]()
        capability = capabilities.get(name, HOPPER)
        made += [_compile(name, kernel, args, options, capability) for kernel, (args, options) in asked]
    for capability in {described.capability for described, _ in made}:
        read = [binary for described, binary in made if described.capability == capability and _is_read(described)]
        _disassemble(read, capability)
    for described, binary in made:
        sass = _kept(binary, "sass").read_text() if _is_read(described) else ""
        print(json.dumps(dataclasses.asdict(described) | {"sass": sass}))


def _is_read(made: Compiled) -> bool:
    """Whether the tests look at its SASS: of other GPUs for spills alone."""
    if made.capability != HOPPER:
        return made.spills > 0
    return bool(re.search(r"wgmma|\.satfinite\.e[45]m[23]x2", made.ptx))


def _compile(
    call: str, kernel: Any, args: tuple[Any, ...], options: dict[str, Any], capability: int
) -> tuple[Compiled, Any]:
    """As JITFunction.run does before it launches: the kernel, but for its SASS, and as Triton has it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = bind(*args, debug=False, **options)
    chosen, signature, constants, attributes = kernel._pack_args(
        backend, {"debug": False, **options}, bound, specialization, rest
    )
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    made, log = _assemble(functools.partial(triton.compile, source, target=target, options=chosen.__dict__))
    used = re.search(r"Used (\d+) registers", log)
    assert used is not None, f"the assembler said nothing of registers: {log}"
    described = Compiled(
        call=call,
        kernel=kernel.__name__,
        registers=int(used[1]),
        spills=sum(int(size) for size in re.findall(r"(\d+) bytes spill", log)),
        shared=made.metadata.shared,
        warps=made.metadata.num_warps,
        warnings=tuple(line for line in log.splitlines() if "warning" in line or re.search(SERIALISED, line)),
        ptx=made.asm["ptx"],
        sass="",
        ttgir=made.asm["ttgir"],
        capability=capability,
    )
    return described, made


def _assemble(compile_kernel: Callable[[], Any]) -> tuple[Any, str]:
    """The kernel and what the assembler said: kept beside Triton's cache, for a cached kernel is not assembled again."""
    import triton

    triton.knobs.nvidia.dump_ptxas_log = True  # printed where it runs
    for anew in (False, True):
        triton.knobs.compilation.always_compile = anew
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            made = compile_kernel()
        kept = _kept(made, "log")
        if printed.getvalue():
            _keep(kept, printed.getvalue())
        if kept.exists():
            break
    return made, kept.read_text()


def _disassemble(made: list[Any], capability: int) -> None:
    """Keep their SASS, by one process: the tool takes 0.3 s to start. A kernel's addresses are those among all of them."""
    import triton

    anew = {binary.hash: binary for binary in made if not _kept(binary, "sass").exists()}
    if not anew:
        return
    codes = [_code(binary.asm["cubin"]) for binary in anew.values()]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        tool = str(Path(triton.knobs.nvidia.ptxas.path).parent / "nvdisasm")
        command = [tool, "--binary", f"SM{capability}" + "a" * (capability >= HOPPER), file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^\s+/\*[0-9a-f]+\*/\s.*", printed, re.M)
    assert len(lines) * INSTRUCTION == sum(map(len, codes)), "the disassembler leaves instructions out"
    rest = iter(lines)
    for binary, code in zip(anew.values(), codes, strict=True):
        _keep(_kept(binary, "sass"), "\n".join(itertools.islice(rest, len(code) // INSTRUCTION)))


def _code(cubin: bytes) -> bytes:
    """What an ELF file holds in its executable sections."""
    (table,), (size, number) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(number)]
    return b"".join(cubin[start : start + length] for _, _, flags, _, start, length in headers if flags & 4)


def _kept(made: Any, kind: str) -> Path:
    """Beside Triton's cache."""
    import triton

    return Path(triton.knobs.cache.dir) / f"{made.hash}.{kind}"


def _keep(path: Path, text: str) -> None:
    """At once: other processes compile the same kernels, and read what is there."""
    half = path.with_suffix(f"{path.suffix}.{os.getpid()}")
    half.write_text(text)
    half.replace(path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
