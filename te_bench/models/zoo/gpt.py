"""GPT-2 as nanoGPT trains it, with a vocabulary that may be padded. Reads from top to bottom.

    model = GPT(CONFIGS["gpt2"], attention="flash", padded_vocab_size=50304)
    loss = model(tokens, targets)           # (B, T) int64 x2 -> () float32, in nats

te_bench.training.weights loads and saves its weights in the Hugging Face layout.

Source: Radford et al. 2019 (GPT-2); Karpathy, nanoGPT model.py, for initialisation and the tied head.
Shapes: B batch, T tokens, C = n_embd, H heads, D = C / H, V vocabulary, Vp padded vocabulary.
"""

import contextlib
import math
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_bench.kernels.cross_entropy.backends.reference import cross_entropy
from te_bench.kernels.linear_cross_entropy import Backend as Head
from te_bench.kernels.linear_cross_entropy import load as load_head
from te_bench.kernels.linear_cross_entropy.tied import tied
from te_bench.models import fp8, fp8_attention
from te_bench.models.configs import CONFIGS as CONFIGS  # part of this module's interface
from te_bench.models.configs import GPTConfig as GPTConfig
from te_bench.models.fused import blocks as fused_blocks
from te_bench.models.modules.linear import Linear
from te_bench.models.modules.plain import are_plain
from te_bench.models.recipe import Recipe


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, attention: str, linear: Callable[..., nn.Module]):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.attention = fp8_attention.ByRecipe(attention)
        self.c_attn = linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        heads = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        q, k, v = heads  # (B, H, T, D) each
        dropout = self.dropout if self.training else 0.0
        y = self.attention(q, k, v, causal=True, scale=1 / math.sqrt(q.shape[-1]), dropout=dropout)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig, linear: Callable[..., nn.Module]):
        super().__init__()
        self.c_fc = linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU(approximate=config.gelu)
        self.c_proj = linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, attention: str, linear: Callable[..., nn.Module]):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, attention, linear)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config, linear)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Everything but the head; the names are those of OpenAI's checkpoints."""

    def __init__(
        self, config: GPTConfig, attention: str, padded: int, linear: Callable[..., nn.Module], blocks: str | None
    ):
        super().__init__()
        self.config, self.fused = config, blocks == "fused"
        self.warned: set[str] = set()  # why passes were not fused
        self.attention = fp8_attention.ByRecipe(attention)
        self.wte = nn.Embedding(padded, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, attention, linear) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)

    def forward(self, tokens: Tensor, embedded: Tensor | None = None) -> Tensor:
        """embedded: wte(tokens) + wpe(positions), where somebody has looked them up."""
        if embedded is None:
            embedded = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.drop(embedded)
        if self.fused and fused_blocks.can_fuse(self.h, self.ln_f):
            heads, gelu = self.config.n_head, self.config.gelu
            return fused_blocks.run(self.h, self.ln_f, x, attend=self.attention, heads=heads, gelu=gelu)
        if self.fused:
            self._warn_once(fused_blocks.why_not(self.h, self.ln_f))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)

    def _warn_once(self, why: str) -> None:
        if why not in self.warned:
            self.warned.add(why)
            message = (
                f'blocks="fused", but this pass goes module by module: {why}. Others for this reason will not say so'
            )
            warnings.warn(message, fused_blocks.NotFused, stacklevel=2)


class GPT(nn.Module):
    """A decoder-only transformer, pre-LN, learned positions, head tied to the token embedding.

    padded_vocab_size (Vp >= V) widens embedding and head; the padding never receives probability or gradient, so the
    model is the unpadded one. With a `recipe` every Linear but the head computes in FP8 under `model.autocast()`, and
    attention, too, if the recipe's fp8_dpa asks for it.
    head: a name of te_bench.kernels.linear_cross_entropy, by which a training pass computes the loss from the last hidden
    states, without all the logits; None computes them. An evaluation, model.eval(), takes `chunked` in place of any head:
    it keeps no logits either, and its loss is of the weights, not of the rounding that they are trained with.
    blocks: "fused" computes from one attention to the next by fused kernels (models.fused.blocks), None one module after
    the other, as every pass goes that somebody watches (hooks on a block's modules, calibration), or that has frozen
    weights in it or a Linear of another class: of a model that was to be fused the first such pass warns,
    fused_blocks.NotFused, and says why. What torch.compile compiles is fused whatever watches it. Parameters and their
    names are the same. Raises ValueError for dropout in fused blocks.
    """

    def __init__(
        self,
        config: GPTConfig,
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
        if blocks == "fused" and config.dropout:
            raise ValueError(
                f"blocks fused: no kernel has dropout {config.dropout}; set dropout 0, or leave blocks out"
            )
        self.config, self.recipe, self.blocks = config, recipe, blocks
        self.heads = None if head is None else {True: load_head(head), False: load_head("chunked")}
        linear = nn.Linear if recipe is None else Linear
        device = torch.get_default_device()
        # Built on meta: torch's own initialisation would cost time, and draw more random numbers for a wider padding.
        with torch.device("meta"):
            self.transformer = Transformer(config, attention, padded, linear, blocks)
            self.lm_head = nn.Linear(config.n_embd, padded, bias=False)
        self.to_empty(device=device)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """N(0, 0.02) for embeddings and weights, N(0, 0.02 / sqrt(2 n_layer)) into the residual stream, 0 for biases.

        The padding rows are 0 and draw no random numbers, so one seed gives the same model at every padded width.
        Ties the head to the token embedding first: moving a model off the meta device unties it.
        """
        self.lm_head.weight = self.transformer.wte.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.n_layer))
            elif name == "transformer.wte.weight":
                nn.init.normal_(parameter[: self.config.vocab_size], std=0.02)
                nn.init.zeros_(parameter[self.config.vocab_size :])
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            else:  # LayerNorm gain
                nn.init.ones_(parameter)

    @torch.no_grad()
    def perturb(self, seed: int, ulps: int = 1) -> None:
        """Move every weight to a representable neighbour, `ulps` times, up or down as `seed` has it; the padding stays 0.

        The signs do not depend on the padded width or the device.
        """
        for number, parameter in enumerate(self.parameters()):
            weight = parameter[: self.config.vocab_size] if parameter is self.lm_head.weight else parameter
            generator = torch.Generator().manual_seed(seed << 16 | number)
            up = torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.int8).to(weight.device)
            towards = torch.where(up == 1, torch.inf, -torch.inf).to(weight.dtype)
            for _ in range(ulps):
                weight.copy_(torch.nextafter(weight, towards))

    def autocast(self, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
        """What a forward pass runs in: the recipe's FP8, outside of what torch.compile sees; nothing without a recipe.

        enabled=False switches FP8 off: the pass is that of the same model without a recipe.
        """
        return contextlib.nullcontext() if self.recipe is None else fp8.autocast(enabled, recipe=self.recipe)

    def hidden(self, tokens: Tensor) -> Tensor:
        """(B, T) int64 -> (B, T, C), after the last LayerNorm. Raises ValueError when T > block_size."""
        self._check(tokens)
        return self.transformer(tokens)

    def _check(self, tokens: Tensor) -> None:
        if self.recipe is not None and fp8.current.recipe is None:
            raise ValueError("this GPT has an FP8 recipe, but runs outside of autocast: with model.autocast(): ...")
        if tokens.shape[1] > self.config.block_size:
            raise ValueError(f"{tokens.shape[1]} tokens, but block_size is {self.config.block_size}")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; (B, T) int64 x2 -> () float32. The logits do not outlive the call."""
        if self.heads is not None:
            return self._through_head(self.heads[self.training], tokens, targets.flatten())
        x = self.hidden(tokens).flatten(0, 1)
        logits = self.lm_head(x)  # (B T, Vp), no view: see cross_entropy
        return cross_entropy(logits, targets.flatten(), vocab=self.config.vocab_size)

    def _through_head(self, head: Head, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss; with one gradient made for embedding and head where nothing looks between them."""
        tables, weight = (self.transformer.wte, self.transformer.wpe), self.lm_head.weight
        table: Tensor = tables[0].weight
        copy = weight if getattr(weight, "copy_of", None) is table else None  # an optimizer's, in the table's place
        shared = (weight is table or copy is not None) and head.copied and not torch.compiler.is_compiling()
        if not shared or not are_plain(tables):
            x = self.hidden(tokens).flatten(0, 1)
            loss: Tensor = head.forward(x, weight, targets, vocab=self.config.vocab_size)
            return loss
        self._check(tokens)
        embedded, again = tied(table, tables[1].weight, tokens)
        x = self.transformer(tokens, embedded).flatten(0, 1)
        loss = head.forward(x, again, targets, vocab=self.config.vocab_size, copy=copy)
        return loss

    def logits(self, tokens: Tensor) -> Tensor:
        """(B, T) int64 -> (B, T, V): without the padding columns."""
        return F.linear(self.hidden(tokens), self.lm_head.weight[: self.config.vocab_size])

    def flop_per_token(self, length: int) -> int:
        """6 N + 12 L H D T: nanoGPT's count (forward and backward, attention as if it were not causal).

        N leaves out the position embedding, and the padding rows, which are work that nobody asked for.
        """
        c = self.config
        padding = (self.lm_head.weight.shape[0] - c.vocab_size) * c.n_embd
        n = sum(p.numel() for p in self.parameters()) - self.transformer.wpe.weight.numel() - padding
        return 6 * n + 12 * c.n_layer * c.n_embd * length
