"""One optimisation step in every execution mode, and the training loop that yields (step, loss).

Follows nanoGPT's train.py: fused AdamW with weight decay on matrices only, linear warm-up, cosine decay, clipping,
gradient accumulation, float32 parameters under autocast.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from te_bench import plugins
from te_bench.kernels import adamw as adamws
from te_bench.training import compiled_blocks, fewer_bits
from te_bench.training.optimizer import STATES, TableAdamW
from te_bench.training.parallel import SINGLE, Parallel
from te_bench.training.undisturbed import undisturbed

AUTOCAST = {"fp64": None, "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
MODES = ("eager", "compile", "compile-blocks", "compile-reduce-overhead", "cudagraph")


@dataclass(frozen=True, kw_only=True, slots=True)
class Optim:
    """AdamW and its schedule; the defaults are those of nanoGPT's train_gpt2.py. grad_clip 0 means no clipping."""

    learning_rate: float = 6e-4
    min_learning_rate: float = 6e-5
    warmup: int = 0  # steps
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    accumulate: int = 1

    def rate(self, step: int, progress: float) -> float:
        """Return the learning rate: linear over `warmup` steps, then the cosine of `progress` (0..1 of the training).

        Unlike nanoGPT's, the cosine begins at the first step: a training with a time budget cannot know where its
        warm-up ends. So the rate drops at the warm-up's end.
        """
        if step < self.warmup:
            return self.learning_rate * (step + 1) / (self.warmup + 1)
        cosine = 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
        return self.min_learning_rate + cosine * (self.learning_rate - self.min_learning_rate)


def adamw(model: nn.Module, optim: Optim, *, capturable: bool = False) -> torch.optim.AdamW:
    """Fused AdamW; tensors of two and more dimensions decay, the others do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    device = parameters[0].device
    # A captured graph reads the rate from memory; a Python float would be frozen into it.
    rate = torch.tensor(optim.learning_rate, dtype=torch.float32, device=device) if capturable else optim.learning_rate
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True, capturable=capturable)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    dtype = AUTOCAST[precision]
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def fp8_autocast(model: nn.Module, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """Return the model's own autocast (a GPT has one for its recipe); enabled=False switches FP8 off."""
    own: Callable[[bool], contextlib.AbstractContextManager[None]] | None = getattr(model, "autocast", None)
    return contextlib.nullcontext() if own is None else own(enabled)


class CannotCapture(ValueError):
    """Raised for a step that no CUDA graph can hold. Its process can capture nothing afterwards."""


class TrainStep:
    """Forward, backward, clip and AdamW on one batch: step(tokens, targets) -> loss, a () tensor on the device.

    tokens and targets are (accumulate * B, T) int64. Nothing waits for the device. Modes: "eager"; "compile"
    (torch.compile); "compile-blocks" (torch.compile of each block, the rest eager: training.compiled_blocks);
    "compile-reduce-overhead" (its own CUDA graphs around forward and backward); "cudagraph" (compiled forward and
    backward, clip and optimizer captured as one CUDA graph; a model with `as_it_is` is captured uncompiled, because
    fused blocks leave a compiler little to fuse). `grad_norm`, a () tensor, is the last step's gradient norm before
    clipping; None without clipping. optimizer: a name of te_bench.kernels.adamw; it updates all parameters at once
    and, in bf16 and fp8, writes the copies that the next pass uses (training.optimizer). None is torch's fused AdamW.
    states: "bf16" or "fp8", the optimizer's format of matrices' moments; None is float32. torch's AdamW always
    takes the weights' dtype. parallel: how the step is divided over ranks, each of which is given the whole batch; it
    makes `model` one rank's part. Raises ValueError for unknown or unsupported settings.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: Optim,
        *,
        precision: str,
        mode: str,
        optimizer: str | None = None,
        parallel: Parallel = SINGLE,
        states: str | None = None,
    ):
        plugins.check("precision", precision, list(AUTOCAST))
        plugins.check("mode", mode, list(MODES))
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("the model has no weight to train; set requires_grad of those that shall learn")
        if optim.accumulate < 1:
            raise ValueError(f"accumulate {optim.accumulate}: give 1 or more micro-batches")
        if precision == "fp8" and not getattr(model, "in_fp8", True):
            raise ValueError("precision fp8: the model has no recipe; give it one, adopt(module, recipe=...), or bf16")
        blocks = "fused" if getattr(model, "blocks", None) == "fused" else None
        reason = parallel.unsupported(precision=precision, mode=mode, optimizer=optimizer, blocks=blocks)
        if mode == compiled_blocks.MODE and parallel is not SINGLE:
            reason = reason or compiled_blocks.ONE_PROCESS
        if reason:
            raise ValueError(f"parallel {parallel.name}: {reason}")
        self.model, self.optim, self.precision, self.mode, self.parallel = model, optim, precision, mode, parallel
        self.device = next(model.parameters()).device
        self.captured = mode == "cudagraph"
        if self.captured and (self.device.type != "cuda" or precision == "fp16"):
            got = f"got {self.device.type}, {precision}; take mode eager or compile"
            raise ValueError(f"mode cudagraph needs a GPU and no gradient scaler; {got}")
        parallel.prepare(model, AUTOCAST[precision])
        if states is not None:
            plugins.check("states", states, [name for name in STATES if name is not None])
            if optimizer is None:
                self._check_torchs(states)
        self.states = states
        self.table = None if optimizer is None else self._table_adamw(optimizer)
        self.optimizer: Any = self.table or parallel.shared(adamw(model, optim, capturable=self.captured))
        parallel.watch(self._trained() if self.table is None else self.table.whole_holders())
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self._using: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if mode == compiled_blocks.MODE:
            self.forward: Callable[..., Tensor] = model
            self._using = compiled_blocks.CompiledBlocks(model).used
        elif mode == "compile-reduce-overhead":
            self.forward = torch.compile(model, mode="reduce-overhead", dynamic=False)
        else:
            self.forward = parallel.forward(model, self._compiles())
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, Tensor] | None = None
        self._loss: Tensor | None = None
        self.grad_norm: Tensor | None = None
        self._norm: Tensor | None = None  # in the graph's memory
        self.fed: Callable[[Tensor, Tensor], None] | None = None  # is called with the batch of each step
        self.captured_peak_bytes: int | None = None  # replays allocate nothing: the peak is the capture's

    def _check_torchs(self, states: str) -> None:
        """Raise ValueError unless torch's AdamW would keep states so: it takes the weights' dtype."""
        dtypes = {p.dtype for p in self.model.parameters() if p.requires_grad and p.dim() >= 2}
        weights = "bf16" if dtypes == {torch.bfloat16} else None
        if reason := fewer_bits.unsupported(weights, states, torchs=True):
            have = " and ".join(sorted(map(str, dtypes)))
            raise ValueError(f"weights {have}, states {states}: {reason}, {' or '.join(adamws.names())}")

    def _table_adamw(self, name: str) -> TableAdamW:
        if self.precision == "fp16":
            raise ValueError(f"optimizer {name} with fp16: it has no gradient scaler; choose bf16, or no optimizer")
        return TableAdamW(
            self.model,
            name,
            weight_decay=self.optim.weight_decay,
            betas=(self.optim.beta1, self.optim.beta2),
            rate=self.optim.learning_rate,
            bf16=AUTOCAST[self.precision] is torch.bfloat16,
            accumulate=self.optim.accumulate,
            fixed=not self.captured,
            region=functools.partial(fp8_autocast, self.model),
            parallel=self.parallel,
            states=self.states,
            turns=self.parallel is SINGLE and not self._compiles(),
        )

    @property
    def own_optimizer(self) -> Any:
        """The optimizer that holds this rank's states: one inside torch's ZeroRedundancyOptimizer, or the step's."""
        return getattr(self.optimizer, "optim", self.optimizer)

    def _compiles(self) -> bool:
        """Return whether torch.compile makes the forward pass, in any mode."""
        return self.mode not in ("eager", "cudagraph") or (self.captured and not getattr(self.model, "as_it_is", False))

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a TrainStep has no copy: make another one of copy.deepcopy(step.model); training.resume's save and load "
            "carry the optimizer over"
        )

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if not isinstance(tokens, Tensor) or not isinstance(targets, Tensor):
            given = " and ".join(type(x).__name__ for x in (tokens, targets))
            raise ValueError(
                f"a step takes two tensors, inputs and targets, and got {given}; of a batch that is a dict take its parts"
            )
        if self.captured:
            loss = self._replay(tokens, targets)
        else:
            self._prepare()
            loss = self._backward(tokens, targets)
            self._update()
            self._end()
        if self.fed is not None:
            self.fed(*(self._inputs or (tokens, targets)))  # a graph's are where it reads them
        return loss

    def _prepare(self) -> None:
        if self.table is not None:
            self.table.prepare()
            self.table.zero_grad(set_to_none=self.captured)

    def _end(self) -> None:
        """Clean up after a step that is not captured. A table keeps its gradient buffers."""
        if self.table is None:
            self.optimizer.zero_grad(set_to_none=True)

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def gradients(self, tokens: Tensor, targets: Tensor, *, records: bool = False) -> tuple[float, dict[str, Tensor]]:
        """Return (loss, {parameter: clipped gradient}) from the kernels that the step trains with; changes no state.

        records: keep what a pass changes beside gradients: buffers, the recipe's scales, the random generator.
        """
        with contextlib.nullcontext() if records else undisturbed(self.model):
            if self.captured:
                if self._graph is None:
                    self._capture(tokens, targets)
                saved = self._snapshot()
                loss = self._replay(tokens, targets)
                self._restore(saved)
            else:
                self._prepare()
                loss = self._backward(tokens, targets)
        if self.table is not None:
            by_parameter = self.table.gradients()
            named = self.model.named_parameters()
            return loss.item(), {name: by_parameter[p] for name, p in named if p in by_parameter}
        whole = self.parallel.whole
        by_name = {name: whole(p.grad.detach(), p) for name, p in self.model.named_parameters() if p.grad is not None}
        if self.captured or self.mode == "compile-reduce-overhead":  # other modes free theirs here, and need no copy
            by_name = {name: gradient.clone() for name, gradient in by_name.items()}
        if not self.captured:  # the graph owns its gradient buffers
            self._end()
            self.scaler.update(self.scaler.get_scale())  # forget that these gradients were unscaled; keep the scale
        return loss.item(), by_name

    def _backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward over the micro-batches, unscale and clip; return the mean loss."""
        if self.mode == "compile-reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        n = self.optim.accumulate
        if len(tokens) % n:
            raise ValueError(f"{len(tokens)} rows do not divide into {n} micro-batches")
        self.parallel.require_same_batch(tokens, targets)
        losses = []
        for left, x, y in zip(range(n)[::-1], tokens.chunk(n), targets.chunk(n), strict=True):
            with self._using(), contextlib.ExitStack() as computing:
                with self.region():
                    if self.table is not None:
                        computing.enter_context(self.table.computing())
                    loss = self.forward(self.parallel.rows(x), self.parallel.rows(y)) / n
                # Still with compiled blocks and the copies: checkpointed blocks recompute their forward pass with them.
                with contextlib.nullcontext() if left else self.parallel.reducing():
                    self.scaler.scale(loss).backward()
            if self.table is not None:
                self.table.gather()
            losses.append(loss.detach().clone())  # the clone outlives the CUDA graph's own memory
        if self.table is not None and not self.captured:
            self.table.pass_by()
        self.parallel.reduce(self._trained() if self.table is None else self.table.gradient_holders())
        self._clip()
        return self.parallel.mean(losses[0] if n == 1 else torch.stack(losses).sum())

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Enclose a forward pass of the model: sets its precision."""
        rounded = contextlib.nullcontext() if self.parallel.casts else autocast(self.device, self.precision)
        with rounded, fp8_autocast(self.model):
            yield

    def _trained(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)

    def _clip(self) -> None:
        if self.table is not None:
            if self.captured and self._graph is None:  # a warm-up pass
                self.table.bind()
            if self.optim.grad_clip:
                self.grad_norm = self.table.clip(self.optim.grad_clip)
            return
        self.scaler.unscale_(self.optimizer)
        if self.optim.grad_clip:
            self.grad_norm = self.parallel.clip(self.model.parameters(), self.optim.grad_clip)

    def _update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _snapshot(self) -> list[Tensor]:
        return [t.detach().clone() for t in self._state()]

    def _state(self) -> list[Tensor]:
        moments = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return [*self.model.parameters(), *moments]

    @torch.no_grad()
    def _restore(self, saved: list[Tensor]) -> None:
        for tensor, value in zip(self._state(), saved, strict=True):
            tensor.copy_(value)

    def _capture(self, tokens: Tensor, targets: Tensor) -> None:
        """Warm up on a side stream, restore the state, then record one step, all on the model's GPU."""
        self._inputs = (tokens.clone(), targets.clone())
        with torch.cuda.device(self.device):  # streams and graphs belong to the current GPU
            # Use one stream of this GPU for both. PyTorch's default capture stream belongs to the first capture's GPU,
            # and what a pass makes once, such as autograd's nodes, may wait for the stream that made it.
            stream = torch.cuda.Stream()
            # Delayed scales, too: they would know the first batch before it is trained on, as no eager step's do.
            with undisturbed(self.model):
                self._warm_up(*self._inputs, stream)
            if self.table is not None:
                self.table.release_gradients()  # the graph allocates its own
            torch.cuda.reset_peak_memory_stats()
            self._graph = torch.cuda.CUDAGraph()
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            random = generator.clone_state()
            try:
                # With ranks, NCCL's watchdog thread queries events during the capture.
                capture_error_mode = "global" if self.parallel is SINGLE else "thread_local"
                with torch.cuda.graph(self._graph, stream=stream, capture_error_mode=capture_error_mode):
                    self._loss = self._backward(*self._inputs)
                    self._norm = self.grad_norm
                    self._update()
            except BaseException as error:
                self._graph = None  # otherwise the next step would replay an empty graph
                generator.graphsafe_set_state(random)  # a failed capture leaves the generator waiting for its end
                if isinstance(error, ValueError) and "CUDA graph" in str(error):  # raised by te-bench's own attention
                    raise CannotCapture(f"mode cudagraph: {error}") from error
                if isinstance(error, RuntimeError) and "captur" in str(error):
                    said = str(error).strip().partition("\n")[0]
                    raise CannotCapture(
                        "mode cudagraph: the model waits for the GPU, or draws on it, within its pass, which no CUDA graph "
                        f"can hold: choose another mode (torch: {said})"
                    ) from error
                raise
            self.captured_peak_bytes = torch.cuda.max_memory_allocated()
        if self.table is not None:
            self.table.move()

    def _warm_up(self, tokens: Tensor, targets: Tensor, stream: Any) -> None:
        # Without an update all moments are 0 and need no copy. With one, copies of weights and moments beside the gradients
        # could fill the GPU.
        begun = any(state["step"].item() for state in self.optimizer.state.values() if "step" in state)
        copied = functools.partial(Tensor.to, device="cpu", copy=True) if begun else torch.clone
        weights = [copied(p.detach()) for p in self.model.parameters()]
        states = self.optimizer.state.items() if begun else ()
        moments = {of: {name: copied(value) for name, value in state.items()} for of, state in states}
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compilation, autotuning and library handles must not happen during capture
                self._prepare()
                self._backward(tokens, targets)
                self._update()
                self._end()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), weights, strict=True):
                p.copy_(value)
            for of, state in self.optimizer.state.items():
                for name, value in state.items():
                    if of in moments:
                        value.copy_(moments[of][name])
                    elif value.dtype is not torch.int64:  # not the seed
                        value.zero_()

    def _replay(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self._graph is None:
            self._capture(tokens, targets)
        assert self._graph is not None
        assert self._inputs is not None
        assert self._loss is not None
        for held, given in zip(self._inputs, (tokens, targets), strict=True):
            if held.shape != given.shape:  # copy_ would broadcast a smaller one silently
                raise ValueError(
                    f"mode cudagraph: the captured step is of a batch {tuple(held.shape)}, and this one is "
                    f"{tuple(given.shape)}; give every call the same shape, or choose another mode"
                )
        self._inputs[0].copy_(tokens)
        self._inputs[1].copy_(targets)
        if self.table is not None:
            self.table.prepare()
        self._graph.replay()
        if self.table is not None:
            self.table.replayed()
        self.grad_norm = None if self._norm is None else self._norm.clone()
        return self._loss.clone()


def train(
    step: TrainStep,
    batches: Callable[[int], tuple[Tensor, Tensor]],
    progress: Callable[[int], float | None],
    first: int = 0,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (step, loss) from step `first` until `progress(step)` returns None; the loss stays on the device, unread.

    batches(k) is the batch of step k; progress(k), 0 to 1, is the place of step k on the learning-rate schedule.
    """
    number = first
    while (at := progress(number)) is not None:
        step.set_rate(step.optim.rate(number, at))
        yield number, step(*batches(number))
        number += 1
