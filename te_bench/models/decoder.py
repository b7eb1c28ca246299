"""A decoder-only language model that describes itself.

A family of models is a file of models/zoo. It describes itself: `build` makes its modules, `body` computes them one by
one, `parts` names the parts of its blocks, `tables` its vocabulary tables, and INTO_STREAM or its own `init_parameter`
the initial weights. The loss, fused blocks (models.fused), the optimizer's copies, checks, costs and checkpoints use
only this.

    model = load("gpt2", attention="flash", padded_vocab_size=50304)
    loss = model(tokens, targets)           # (B, T) int64 x2 -> () float32, in nats

Shapes: B batch, T tokens, C hidden features, V vocabulary, Vp padded vocabulary.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_bench import plugins
from te_bench.kernels.linear_cross_entropy import Backend as Head
from te_bench.kernels.linear_cross_entropy import load as load_head
from te_bench.kernels.linear_cross_entropy.backends.reference import cross_entropy
from te_bench.kernels.linear_cross_entropy.tied import tied
from te_bench.models import description, fp8
from te_bench.models.configs import ZOO, DecoderConfig, configs
from te_bench.models.fused import chain
from te_bench.models.modules.linear import Linear
from te_bench.models.modules.plain import are_plain, why_not_plain
from te_bench.models.parts import AttentionPart, NormPart, Part
from te_bench.models.recipe import Recipe

MakeLinear = Callable[..., nn.Module]


class NotFused(UserWarning):
    """Warns that blocks which should be fused are computed module by module; the message says why."""


class Tables(NamedTuple):
    """The modules outside the blocks: token embedding, position embedding or None, last norm and head.

    A tied head's weight is the token embedding's.
    """

    tokens: nn.Embedding
    positions: nn.Embedding | None
    norm: nn.Module
    head: nn.Linear


class Passes(NamedTuple):
    """Another project's computation of a decoder's blocks and last norm with the decoder's parameters (models.rivals).

    body(model, x) replaces Decoder.body, (B, T, C) -> (B, T, C); autocast(enabled) is the forward pass's context.
    """

    body: "Callable[[Decoder, Tensor], Tensor]"
    autocast: Callable[[bool], contextlib.AbstractContextManager[Any]]


class Decoder(nn.Module):
    """A decoder-only transformer: embeddings, pre-norm blocks in a residual stream, a norm, and a head.

    padded_vocab_size (Vp >= V) widens embedding and head; the padding never receives probability or gradient, so the
    model is the unpadded one. With a `recipe` every Linear but the head computes in FP8 under `model.autocast()`, and
    so does attention if the recipe has fp8_dpa.
    head: a name of te_bench.kernels.linear_cross_entropy, which computes a training pass's loss from the last hidden
    states without all logits; None computes all logits. An evaluation (model.eval()) uses `chunked` instead of any
    head: it keeps no logits either, and its loss has no FP8 rounding.
    blocks: "fused" computes from one attention to the next by fused kernels (models.fused.chain); None computes module
    by module. A fused model also does so for passes with hooks on a block's modules, calibration, frozen weights or a
    Linear of another class, and the first such pass warns (NotFused) and says why. Under torch.compile it is always
    fused. Parameters and their names are the same. Raises ValueError for dropout in fused blocks, and for a family that
    describes itself wrongly (models.description).
    """

    INTO_STREAM: tuple[str, ...] = ()  # name endings of weights whose GEMM's output is added to the residual stream
    shares_amaxes = False  # over all ranks; set by training.parallel

    def __init__(
        self,
        config: Any,
        *,
        attention: str = "flash",
        padded_vocab_size: int | None = None,
        recipe: Recipe | None = None,
        head: str | None = None,
        blocks: str | None = None,
    ):
        super().__init__()
        padded = padded_vocab_size or config.vocab_size
        if padded < config.vocab_size:
            raise ValueError(f"padded_vocab_size {padded} < vocab_size {config.vocab_size}")
        if blocks not in (None, "fused"):
            raise ValueError(f'blocks {blocks!r}: "fused", or None for one module after the other')
        if blocks == "fused" and not self.says_parts():
            raise ValueError(f"blocks fused: {type(self).__name__} does not say its parts; leave blocks out")
        if blocks == "fused" and config.dropout:
            raise ValueError(
                f"blocks fused: no kernel has dropout {config.dropout}; set dropout 0, or leave blocks out"
            )
        if head == "fp8" and recipe is not None and (reason := recipe.lacks_fp8_head()):
            raise ValueError(f"head fp8: {reason}; choose chunked")
        self.config, self.recipe, self.blocks = config, recipe, blocks
        self.heads = None if head is None else {True: load_head(head), False: load_head("chunked")}
        self.warned: set[str] = set()  # reasons of unfused passes that were warned of
        self.passes: Passes | None = None  # a rival's, instead of these blocks
        device = torch.get_default_device()
        # Build on meta: torch's initialisation would cost time, and draw more random numbers for a wider padding.
        with torch.device("meta"):
            self.build(config, attention, padded, nn.Linear if recipe is None else Linear)
            if recipe is not None:
                self._keep(recipe.keeps(name for name, module in self.named_modules() if isinstance(module, Linear)))
        self.to_empty(device=device)
        self.init_weights()
        description.check(self)

    def _keep(self, names: Collection[str]) -> None:
        """Replace these Linears by nn.Linear, which computes in the activations' precision."""
        for name in names:
            parent, _, attribute = name.rpartition(".")
            old: Any = self.get_submodule(name)
            plain = nn.Linear(old.in_features, old.out_features, bias=old.use_bias)
            setattr(self.get_submodule(parent), attribute, plain)

    # ---- what a family defines

    def build(self, config: Any, attention: str, padded: int, linear: MakeLinear) -> None:
        """Make the modules; linear(in, out, bias=...) makes the Linears that a recipe computes in FP8."""
        raise NotImplementedError

    def body(self, x: Tensor) -> Tensor:
        """Compute the blocks and the last norm module by module: (B, T, C) embedded tokens -> (B, T, C)."""
        raise NotImplementedError

    def parts(self) -> tuple[Part, ...]:
        """Return the blocks as parts in the order of computation; () if parts cannot express them: nothing is fused."""
        return ()

    @classmethod
    def says_parts(cls) -> bool:
        return cls.parts is not Decoder.parts

    def tables(self) -> Tables:
        raise NotImplementedError

    def init_parameter(self, name: str, parameter: Tensor) -> None:
        """Initialise a parameter, or the rows of a table without padding, as GPT-2 does.

        N(0, 0.02) for embeddings and weights, N(0, 0.02 / sqrt(2 layers)) into the stream, 0 for biases, 1 for gains.
        """
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 2:
            into_stream = name.endswith(self.INTO_STREAM)
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.shape.layers) if into_stream else 0.02)
        else:
            nn.init.ones_(parameter)

    def angles(self, length: int) -> Tensor | None:
        """Return the rotary angles, (T, at most head_dim) float32; None for learned positions."""
        return None

    # ---- derived from it

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise all weights; padding rows are 0 and draw no random numbers: one seed, one model at every width.

        It first ties a tied head: moving off the meta device unties it.
        """
        self.tie()
        for name, parameter in self.named_parameters():
            rows = self.config.vocab_size if self.has_padding(parameter) else len(parameter)
            self.init_parameter(name, parameter[:rows])
            nn.init.zeros_(parameter[rows:])

    def tie(self) -> None:
        """Make a tied head's weight the token embedding's."""
        if self.config.shape.tied:
            tables = self.tables()
            tables.head.weight = tables.tokens.weight

    def has_padding(self, parameter: Tensor) -> bool:
        """Return whether a parameter has the rows of the padded vocabulary."""
        tables = self.tables()
        return parameter is tables.tokens.weight or parameter is tables.head.weight

    @property
    def head_name(self) -> str:
        """The name of the head in `named_modules`."""
        head = self.tables().head
        return next(name for name, module in self.named_modules() if module is head)

    @torch.no_grad()
    def perturb(self, seed: int, ulps: int = 1) -> None:
        """Move every weight to a neighbouring representable value `ulps` times, up or down by `seed`; padding stays 0.

        The directions do not depend on the padded width or the device.
        """
        for number, parameter in enumerate(self.parameters()):
            move(
                parameter[: self.config.vocab_size] if self.has_padding(parameter) else parameter,
                seed << 16 | number,
                ulps,
            )

    @torch.no_grad()
    def halve(self) -> None:
        """Round the tables and every matrix to bfloat16; vectors (1e-5 of a model's elements) stay float32."""
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                parameter.data = parameter.to(torch.bfloat16)

    @property
    def as_it_is(self) -> bool:
        """Whether a step is captured uncompiled: a compiler would find little to fuse, or a rival's kernels."""
        return self.blocks == "fused" or self.passes is not None

    def te_cast_tables(self) -> list[Tensor]:
        """Return the tables that a training pass casts to FP8 itself: a bf16 copy would last through all layers."""
        casts = self.config.shape.tied and self.heads is not None and self.heads[True] is load_head("fp8")
        return [self.tables().tokens.weight] if casts else []

    def autocast(self, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
        """Enter the forward pass's context: the recipe's FP8, outside of torch.compile's graph; else nothing.

        enabled=False switches FP8 off: the model computes as without a recipe.
        """
        if self.passes is not None:
            return self.passes.autocast(enabled)
        if self.recipe is None:
            return contextlib.nullcontext()
        return fp8.autocast(enabled, recipe=self.recipe, amax_reduction_group=fp8.ranks(self.shares_amaxes))

    def attentions(self) -> list[Any]:
        """Return the modules whose attribute `attention` computes a layer's attention, in order; it can be replaced."""
        if not self.says_parts():
            owners = [(module, getattr(module, "attention", None)) for module in self.modules()]
            return [module for module, own in owners if callable(own) and not isinstance(own, nn.Module)]
        return [part.module for part in self.parts() if isinstance(part, AttentionPart)]

    def gradient_parts(self) -> dict[str, dict[str, int]]:
        """Return {name of a qkv weight: rows of each}, where q, k and v are stacked one after the other."""
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        columns = {}
        for part in self.parts():
            if isinstance(part, AttentionPart) and part.turns == 1:
                q, k = part.heads * part.head_dim, part.groups * part.head_dim
                columns[names[id(part.qkv.weight)]] = {"q": q, "k": k, "v": k}
        return columns

    # ---- passes

    def hidden(self, tokens: Tensor) -> Tensor:
        """Compute (B, T) int64 -> (B, T, C), after the last norm. Raises ValueError if T > block_size."""
        self._check(tokens)
        return self._run(self.embed(tokens))

    def embed(self, tokens: Tensor) -> Tensor:
        """Compute (B, T) int64 -> (B, T, C), the input of the first block."""
        tables = self.tables()
        x: Tensor = tables.tokens(tokens)
        if tables.positions is not None:
            x = x + tables.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return x

    def _run(self, x: Tensor) -> Tensor:
        if self.passes is not None:
            return self.passes.body(self, x)
        if self.blocks != "fused":
            return self.body(x)
        if (why := self._why_not_fused()) is not None:
            self._warn_once(why)
            return self.body(x)
        parts, last = self.parts(), NormPart.of(self.tables().norm)
        return chain.run(parts, last, x, self.angles(x.shape[1]))

    def _why_not_fused(self) -> str | None:
        """Return why this pass must call the blocks' modules one by one (calibration, hooks), or None.

        Under torch.compile, which cannot trace these checks, blocks are always fused.
        """
        if fp8.current.calibrating:
            return "calibration looks at the modules' inputs"
        if torch.compiler.is_compiling():
            return None
        home = type(self).__module__
        if are_plain((module for _, module in self._blocks()), home):
            return None
        return why_not_plain(self._blocks(), home)

    def _blocks(self) -> Iterator[tuple[str, nn.Module]]:
        tables = self.tables()
        outside = {self, tables.tokens, tables.positions, tables.head}
        return ((name, module) for name, module in self.named_modules() if module not in outside)

    def _warn_once(self, why: str) -> None:
        if why not in self.warned:
            self.warned.add(why)
            message = (
                f'blocks="fused", but this pass goes module by module: {why}. Others for this reason will not say so'
            )
            warnings.warn(message, NotFused, stacklevel=2)

    def _check(self, tokens: Tensor) -> None:
        if self.recipe is not None and fp8.current.recipe is None:
            name = type(self).__name__
            raise ValueError(f"this {name} has an FP8 recipe, but runs outside of autocast: with model.autocast(): ...")
        if tokens.shape[1] > self.config.block_size:
            raise ValueError(f"{tokens.shape[1]} tokens, but block_size is {self.config.block_size}")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats; (B, T) int64 x2 -> () float32. The logits do not outlive the call."""
        if self.heads is not None:
            return self._through_head(self.heads[self.training], tokens, targets.flatten())
        return self.loss(self.hidden(tokens).flatten(0, 1), targets.flatten())

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats by all logits, without a `head`; x (B T, C), targets (B T,) -> ()."""
        logits = self.tables().head(x)  # (B T, Vp), not a view: see cross_entropy
        return cross_entropy(logits, targets, vocab=self.config.vocab_size)

    def _through_head(self, head: Head, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the head's loss, with one gradient for a tied embedding and head where no hook looks between."""
        tables = self.tables()
        table: Tensor = tables.tokens.weight
        weight: Tensor = tables.head.weight
        copy = weight if getattr(weight, "copy_of", None) is table else None  # the optimizer's copy
        shared = (weight is table or copy is not None) and head.copied and not torch.compiler.is_compiling()
        embeddings = [module for module in tables[:2] if module is not None]
        if not shared or not are_plain(embeddings):
            x = self.hidden(tokens).flatten(0, 1)
            loss: Tensor = head.forward(x, weight, targets, vocab=self.config.vocab_size)
            return loss
        self._check(tokens)
        positions = None if tables.positions is None else tables.positions.weight
        embedded, again = tied(table, positions, tokens)
        x = self._run(embedded).flatten(0, 1)
        loss = head.forward(x, again, targets, vocab=self.config.vocab_size, copy=copy)
        return loss

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits without padding columns: (B, T) int64 -> (B, T, V)."""
        return F.linear(self.hidden(tokens), self.tables().head.weight[: self.config.vocab_size])

    def flop_per_token(self, length: int) -> int:
        """Return 6 N + 12 L H D T: nanoGPT's count (forward and backward, attention as if it were not causal).

        N excludes tables that are only looked up (positions; tokens if the head is untied) and padding rows, which are
        no useful work. It is the whole model's N where ranks share its weights.
        """
        s = self.config.shape
        n = s.layers * (s.weights + s.vectors) + s.last_vectors + s.vocab * s.hidden
        return 6 * n + 12 * s.layers * s.heads * s.head_dim * length


def move(weight: Tensor, seed: int, ulps: int) -> None:
    """Move each element to a neighbouring representable value `ulps` times, up or down by `seed`, on any device."""
    generator = torch.Generator().manual_seed(seed)
    up = torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.int8).to(weight.device)
    towards = torch.where(up == 1, torch.inf, -torch.inf).to(weight.dtype)
    for _ in range(ulps):
        weight.copy_(torch.nextafter(weight, towards))


def family(config: DecoderConfig) -> type[Decoder]:
    """Return the model class of a configuration."""
    loaded: type[Decoder] = plugins.load(ZOO, config.family, "MODEL")
    return loaded


def build(config: DecoderConfig, **options: Any) -> Decoder:
    """Build the model of a configuration; options as Decoder's."""
    return family(config)(config, **options)


def load(name: str, **options: Any) -> Decoder:
    """Build the model of that name (`te-bench list models`). Raises ValueError for an unknown one."""
    known = configs()
    plugins.check("model", name, list(known))
    return build(known[name], **options)
