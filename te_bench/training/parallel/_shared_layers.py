"""Tensor parallelism, the common part of tp and fsdp2+tp: a group of ranks shares the layers' large weights.

In a pair of Linears, a rank has a share of the first one's output features and the same share of the second one's input
features (te_bench.models.modules.tensor_parallel): attention is cut by heads, MLPs by inner features. A te-bench
decoder's vocabulary is cut by rows (_vocabulary); sequence parallelism also cuts the tokens between pairs. Everything
else is whole, and the same, in every rank of the group. A decoder names its pairs by its parts; any other model by a
`tp_plan` as transformers has: {"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"}.
Source: Shoeybi et al., arXiv:1909.08053; Korthikanti et al., arXiv:2205.05198; transformers, integrations/tensor_parallel.
"""

import fnmatch
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from te_bench.kernels.activation import KINDS
from te_bench.models import dropout
from te_bench.models.adopted import Adopted
from te_bench.models.conversion import HOOKS
from te_bench.models.decoder import Decoder
from te_bench.models.modules.activations import compute_dtype
from te_bench.models.modules.linear import Linear, linear
from te_bench.models.modules.tensor_parallel import Entry, Ranks, divide
from te_bench.models.parts import AttentionPart, Part
from te_bench.training.parallel import Indivisible, _overlap, _vocabulary
from te_bench.training.parallel._group import Grouped, clip_by_kinds, norm_of_parts
from te_bench.training.parallel._stored import Chunk, Stored

#: {style in a tp_plan of transformers: (our mode, how many matrices the weight stacks)}.
STYLES = {"colwise": ("column", 1), "rowwise": ("row", 1), "packed_colwise": ("column", 2)}
#: The style of a module between a pair whose gradient is only that of this rank's heads, and so is all-reduced.
PARTIAL = "replicated_with_grad_allreduce"
#: Styles that we leave whole in every rank: tables, heads, and pairs that gather again what they split.
WHOLE = ("embedding_rowwise", "colwise_gather_output", "rowwise_split_input", "colwise_rep", "sequence_parallel")


class Cut(NamedTuple):
    """A Linear to be cut. pieces: sizes of the matrices that its weight stacks. unit: features that stay together (a
    head).
    """

    layer: nn.Module
    mode: str
    pieces: tuple[int, ...]
    unit: int = 1


class Share(NamedTuple):
    """The dimension of a parameter that the ranks share, each of its stacked pieces by itself."""

    dim: int
    pieces: tuple[int, ...]

    def of(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """Return (begin, end) of a rank's part of each piece; the last ranks' are smaller if it does not divide."""
        return [part_of(size, rank, ranks) for size in self.pieces]


def part_of(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (begin, end) of a rank's part of `size` rows."""
    most = -(-size // ranks)
    return min(rank * most, size), min((rank + 1) * most, size)


class PlainLinear(nn.Linear):
    """A rank's share of an nn.Linear, which stays out of FP8 under te.autocast."""

    def __init__(self, mode: str, ranks: Ranks, features: int, out: int):
        super().__init__(features, out, bias=False, device="meta")
        self.divisions = (divide(ranks, mode),)

    def forward(self, input: Tensor) -> Tensor:
        (division,) = self.divisions
        dtype = compute_dtype(input)
        x = input.to(dtype) if division is None else division.take(input, dtype)
        return linear(division, x, self.weight, self.bias)


class SharedLayers(Grouped):
    """A rank of groups that share layers; a subclass names the group by `tensor_group`.

    sequence_parallel: a rank has its share of the tokens between the layers (te-bench's decoders only). overlap:
    "symmetric" overlaps the pairs' GEMMs with its collectives. Raises ValueError otherwise.
    """

    def __init__(self, sequence_parallel: bool = False, overlap: str | None = None) -> None:
        super().__init__()
        _overlap.check(overlap, sequence_parallel)
        self.sequence_parallel, self.overlap = sequence_parallel, overlap
        self._places: list[tuple[nn.Module, str, Share]] = []
        self._partial: list[tuple[nn.Module, str]] = []
        self._group: Any = None
        self._pairs: list[tuple[str, Linear | PlainLinear]] = []  # (column or row, a rank's share of a Linear)

    def tensor_group(self) -> Any:
        """Return the group of ranks that share this rank's layers. Every rank must call it."""
        raise NotImplementedError

    @classmethod
    def refused(
        cls, *, precision: str, mode: str, optimizer: str | None, blocks: str | None, **gathers: Any
    ) -> str | None:
        if blocks is not None:
            return "fused blocks pass by the modules that add up products; choose blocks that are not fused, or ddp"
        if optimizer is not None:
            return f"the optimizer {optimizer} clips by one rank's gradients; choose torch's AdamW, or ddp"
        if precision == "fp16":
            return "the gradient scaler sees one rank's shares alone; choose bf16"
        return None

    def unsupported(self, **kind: Any) -> str | None:
        reason = super().unsupported(**kind)
        return reason or _overlap.unsupported(self.overlap, self.world // self.replicas, kind["mode"])

    @property
    def draws(self) -> int:
        """The index of this rank's random sequence: ranks with the same tokens between layers draw alike."""
        return self.rank if self.sequence_parallel else self.replica

    def divide(self, model: nn.Module) -> None:
        """Cut the model's pairs and a decoder's vocabulary. Raises Indivisible if they cannot be cut."""
        self._require_divisible(model)
        cuts, partial = plan(model)
        if not cuts:
            raise Indivisible(f"{self.name}: {_no_pairs(model)}, or choose ddp")
        self._group = self.tensor_group()
        _overlap.meet(self.overlap, self._group)
        vocabulary = Ranks("the vocabulary", self._group, sequence_parallel=self.sequence_parallel)
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for parent in model.modules():
            for name, child in parent._modules.items():
                places.setdefault(id(child), []).append((parent, name))
        columns = Counter(places[id(cut.layer)][0][0] for cut in cuts if cut.mode == "column")
        entries = {
            parent: Entry(Ranks("Linear", self._group), readers)
            for parent, readers in columns.items()
            if readers > 1 and not self.sequence_parallel
        }
        for cut in cuts:
            entry = entries.get(places[id(cut.layer)][0][0]) if cut.mode == "column" else None
            _overlap.begin(self.overlap, self._cut(cut, places[id(cut.layer)], entry), getattr(model, "recipe", None))
        if isinstance(model, Decoder) and model.heads is None:  # a head of its own needs the whole table
            self._cut_vocabulary(model, vocabulary)
        if self.sequence_parallel:  # whole modules then see only this rank's tokens
            partial = list(model.modules())
        self._partial = self._whole_parameters(partial)

    def _require_divisible(self, model: nn.Module) -> None:
        rates = sorted({getattr(holder, name) for holder, name in dropout.rates(model)})
        if rates and not self.sequence_parallel:
            raise Indivisible(
                f"{self.name}: dropout {rates[-1]} would hide the same of every rank's heads; set it to 0, or choose ddp"
            )
        if self.sequence_parallel and not isinstance(model, Decoder):
            raise Indivisible(
                f"{self.name}: sequence parallelism is for te-bench's decoders, and this is a {type(model).__name__}; leave "
                "it out"
            )
        if self.sequence_parallel and getattr(model, "heads", None) is not None:
            raise Indivisible(
                f"{self.name}: the model's head takes all tokens and the whole vocabulary; leave out the head, or sequence "
                "parallelism"
            )

    def _whole_parameters(self, modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
        """Return (module, name) of each trained parameter of `modules` that is whole in every rank, once each."""
        found: dict[int, tuple[nn.Module, str]] = {}
        shares = self._shares()
        for module in modules:
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in shares and parameter.requires_grad:
                    found.setdefault(id(parameter), (module, name))
        return list(found.values())

    def _cut_vocabulary(self, model: Decoder, ranks: Ranks) -> None:
        tables = model.tables()
        rows = len(tables.head.weight)
        if part_of(rows, ranks.size - 1, ranks.size)[0] == rows:
            raise Indivisible(f"{self.name}: a vocabulary of {rows} has no rows for {ranks.size} ranks; choose ddp")
        tied = tables.head.weight is tables.tokens.weight
        for module in (tables.tokens,) if tied else (tables.tokens, tables.head):
            self._share(module, "weight", Share(0, (rows,)))
        model.tie()
        _vocabulary.compute_by(model, ranks, part_of(rows, self._group.rank(), ranks.size)[0])

    def _cut(self, cut: Cut, places: list[tuple[nn.Module, str]], entry: Entry | None) -> Any:
        """Replace a Linear by this rank's share. entry: the input gather that column Linears of one module share."""
        layer: Any = cut.layer
        name = places[0][1]
        ranks = self._group.size()
        if type(layer) not in (nn.Linear, Linear) or layer.weight is None:
            raise Indivisible(
                f"{self.name}: {name} is a {type(layer).__name__}, no Linear that te-bench can divide; choose ddp"
            )
        if any(size % (ranks * cut.unit) for size in cut.pieces):
            sizes = " + ".join(str(size // cut.unit) for size in cut.pieces)
            what = "features" if cut.unit == 1 else f"heads of {cut.unit} features"
            raise Indivisible(
                f"{self.name}: the {sizes} {what} of {name} do not divide into {ranks} ranks: take fewer, or choose ddp"
            )
        weight, bias = layer.weight, layer.bias
        out, features = weight.shape
        new: Any
        if type(layer) is nn.Linear:
            own = Ranks("Linear", self._group, sequence_parallel=self.sequence_parallel)
            new = PlainLinear(cut.mode, own, features, out)
        else:
            options: dict[str, Any] = {"params_dtype": weight.dtype, "device": "meta", "bias": bias is not None}
            options |= {"tp_group": self._group, "sequence_parallel": self.sequence_parallel}
            new = Linear(features, out, parallel_mode=cut.mode, **options)
        new.weight, new.bias = weight, bias
        if entry is not None:
            (division,) = new.divisions
            new.divisions = (division._replace(entry=entry),)
        vars(new).update({name: vars(layer)[name] for name in HOOKS})
        self._share(new, "weight", Share(0 if cut.mode == "column" else 1, cut.pieces))
        if bias is not None and cut.mode == "column":
            self._share(new, "bias", Share(0, cut.pieces))
        self._pairs.append((cut.mode, new))
        if self.sequence_parallel:
            _fold(new, cut.mode, ranks)
        new.train(layer.training)
        for parent, name in places:
            setattr(parent, name, new)
        return new

    def _share(self, layer: nn.Module, name: str, share: Share) -> None:
        whole = layer.get_parameter(name)
        parts = share.of(self._group.rank(), self._group.size())
        pieces = zip(whole.detach().split(share.pieces, share.dim), parts, strict=True)
        own = torch.cat([piece.narrow(share.dim, begin, end - begin) for piece, (begin, end) in pieces], share.dim)
        setattr(layer, name, nn.Parameter(own, whole.requires_grad))
        self._places.append((layer, name, share))

    def gathered(self, model: nn.Module, gather: str | None, tokens: int = 0) -> dict[str, tuple[int, int]]:
        """Count bytes: a column Linear gathers its input once, and up to twice more (wgrad in FP8, recomputed blocks).

        A row Linear gathers its gradient once, the head its input once, and the embedding its gradient in float32.
        """
        found = super().gathered(model, gather, tokens)

        def add(dtype: str, least: int, most: int) -> None:
            before = found.get(dtype, (0, 0))
            found[dtype] = before[0] + least, before[1] + most

        if self.sequence_parallel and isinstance(model, Decoder):
            in_fp8 = model.recipe is not None and model.recipe.by_given_scale() is not None
            for mode, layer in self._pairs:
                one = in_fp8 and isinstance(layer, Linear)
                dtype, size = ("uint8", 1) if one else ("bfloat16", 2)
                features = layer.in_features if mode == "column" else layer.out_features
                sent = size * tokens * features
                add(dtype, sent, sent * (3 if mode == "column" else 1))
            embedded = tokens * model.config.shape.hidden
            add("bfloat16", 2 * embedded, 2 * embedded)
            add("float32", 0, 4 * embedded)
        return found

    def overlapped(self, tokens: int) -> int:
        return 0 if self.overlap is None else tokens * _overlap.numbers(self._pairs)

    def _shares(self) -> dict[Any, Share]:
        """Return {parameter: its share}; rebuilt at each call because fully_shard replaces parameters."""
        return {layer._parameters[name]: share for layer, name, share in self._places}

    @torch.no_grad()
    def reduce(self, holders: Iterable[nn.Parameter]) -> None:
        super().reduce(holders)
        found = (module.get_parameter(name).grad for module, name in self._partial)
        own: list[Any] = [g.to_local() if isinstance(g, DTensor) else g for g in found if g is not None]
        for dtype in dict.fromkeys(g.dtype for g in own):  # all gradients of a dtype are sent together
            alike = [g for g in own if g.dtype is dtype]
            flat = torch.cat([g.flatten() for g in alike])
            dist.all_reduce(flat, group=self._group)
            torch._foreach_copy_(
                alike, [x.view_as(g) for g, x in zip(alike, flat.split([g.numel() for g in alike]), strict=True)]
            )

    @torch.no_grad()
    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        shares = self._shares()

        def norm_of_all(kind: tuple[bool, bool], norm: Tensor) -> Tensor:
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            return norm_of_parts(norm, self._group) if kind[0] else norm

        return clip_by_kinds(parameters, max_norm, lambda p, g: (p in shares, isinstance(g, DTensor)), norm_of_all)

    def plain(self, x: Tensor, of: nn.Parameter | None = None) -> Tensor:
        share = None if of is None or not x.dim() else self._shares().get(of)
        if share is None:
            return super().plain(x)
        d = share.dim
        own, first = x.detach(), 0
        if isinstance(x, DTensor):  # FSDP2's rows of the share
            first = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)[1][0]
            own = x.to_local().detach()
        chunks, before, mine = [], 0, 0
        for piece, (begin, end) in zip(share.pieces, share.of(self._group.rank(), self._group.size()), strict=True):
            size = end - begin
            low, high = (max(mine, first), min(mine + size, first + len(own))) if d == 0 else (mine, mine + size)
            if high > low and len(own):
                offsets = [first, *(0 for _ in own.shape[1:])]
                offsets[d] = before + begin + low - mine
                chunks.append(Chunk(torch.Size(offsets), own.narrow(d, low - (first if d == 0 else 0), high - low)))
            before, mine = before + piece, mine + size
        whole = [*x.shape[:d], sum(share.pieces), *x.shape[d + 1 :]]
        return Stored(torch.Size(whole), own, chunks)

    @torch.no_grad()
    def whole(self, x: Tensor, of: nn.Parameter | None = None) -> Tensor:
        x = super().whole(x)
        share = None if of is None else self._shares().get(of)
        if share is None:
            return x
        ranks, d = self._group.size(), share.dim
        largest = sum(end - begin for begin, end in share.of(0, ranks))
        sent = x.new_zeros(*x.shape[:d], largest, *x.shape[d + 1 :])
        sent.narrow(d, 0, x.shape[d]).copy_(x)
        gathered = [torch.empty_like(sent) for _ in range(ranks)]
        dist.all_gather(gathered, sent, group=self._group)
        by_rank = []
        for rank, own in enumerate(gathered):
            sizes = [end - begin for begin, end in share.of(rank, ranks)]
            by_rank.append(own.narrow(d, 0, sum(sizes)).split(sizes, d))
        return torch.cat([part for piece in zip(*by_rank, strict=True) for part in piece], d)


def _fold(layer: nn.Module, mode: str, ranks: int) -> None:
    """Reshape (B, T, features) inside a pair to a rank's (B, T / ranks, features) outside it.

    te's modules gather and scatter along dimension 0: all ranks' tokens, rank after rank.
    """
    if mode == "column":
        layer.register_forward_hook(lambda _, inputs, y: y.reshape(y.shape[0] // ranks, -1, y.shape[2]))
    else:
        layer.register_forward_pre_hook(
            lambda _, inputs: (inputs[0].reshape(inputs[0].shape[0] * ranks, -1, inputs[0].shape[2]),)
        )


def plan(model: nn.Module) -> tuple[list[Cut], list[nn.Module]]:
    """Return the Linears to cut, and the modules between them whose gradients are summed. Raises Indivisible."""
    parts: Any = getattr(model, "parts", None)
    if callable(parts) and getattr(type(model), "says_parts", lambda: True)():
        return _of_parts(parts())
    cuts: list[Cut] = []
    partial: list[nn.Module] = []
    for prefix, module in model.named_modules():
        said = getattr(module, "tp_plan", None)
        if not isinstance(said, dict) or cuts:
            continue
        for name, layer in module.named_modules():
            style = next((style for pattern, style in said.items() if fnmatch.fnmatchcase(name, pattern)), None)
            if style in STYLES:
                holder = module.get_submodule(name.rpartition(".")[0])
                cuts.append(_cut(layer, *STYLES[style], getattr(holder, "head_dim", None)))
            elif style == PARTIAL:
                partial.append(layer)
            elif style is not None and style not in WHOLE:
                raise Indivisible(
                    f"{'.'.join(filter(None, (prefix, name)))} is to be divided as {style}, which te-bench has not; "
                    f"it has {', '.join(STYLES)}: choose ddp"
                )
    return cuts, partial


def _no_pairs(model: nn.Module) -> str:
    """Return the message for a model without pairs, from its own tp_plan if there is one."""
    said = next((plan for m in model.modules() if isinstance(plan := getattr(m, "tp_plan", None), dict) and plan), {})
    theirs = model.module if isinstance(model, Adopted) else model
    name, whole = type(theirs).__name__, " and ".join(dict.fromkeys(map(str, said.values())))
    if whole:
        why = f"the tp_plan of {name} leaves every layer's result whole in each rank ({whole})"
        return f"{why}; give it one with pairs of colwise and rowwise"
    why = f"{name} says not how it divides: give it a tp_plan, as models of transformers have"
    return f'{why} ({{"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"}})'


def _cut(layer: Any, mode: str, halves: int, head_dim: Any) -> Cut:
    """Make the Cut of a Linear. head_dim: its parent's attribute of that name, as transformers' attentions have."""
    size = layer.weight.shape[0 if mode == "column" else 1] // halves
    heads = isinstance(head_dim, int) and head_dim > 0 and size % head_dim == 0
    return Cut(layer, mode, (size,) * halves, head_dim if heads else 1)


def _of_parts(parts: Iterable[Part]) -> tuple[list[Cut], list[nn.Module]]:
    cuts, partial = [], []
    for part in parts:
        if isinstance(part, AttentionPart):
            q, kv = part.heads * part.head_dim, part.groups * part.head_dim
            if part.turns != 1:
                raise Indivisible(
                    "tensor parallelism: its queries, keys and values are by heads in one weight; choose ddp"
                )
            qkv = Cut(part.qkv.module, "column", (q, kv, kv), part.head_dim)
            cuts += [qkv, Cut(part.proj.module, "row", (q,), part.head_dim)]
            norms = (getattr(part.module, name, None) for name in ("q_norm", "k_norm"))
            partial += [norm for norm in norms if isinstance(norm, nn.Module)]
        else:
            rows, features = part.up.weight.shape[0], part.down.weight.shape[1]
            halves = 2 if KINDS[part.activation][1] else 1
            cuts += [
                Cut(part.up.module, "column", (rows // halves,) * halves),
                Cut(part.down.module, "row", (features,)),
            ]
    return cuts, partial
