"""A user's module of factories, as text: tests write it into a folder of their own."""

MODULE = """
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, width=32, layers=1, vocab=64, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(*(Block(width, 2, dropout) for _ in range(layers)))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


class WithTargets(Model):  # as nanoGPT's: logits, loss
    def forward(self, idx, targets=None):
        logits = super().forward(idx)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Random(Model):
    def forward(self, tokens):
        return super().forward(tokens) * (1 + torch.rand((), device=tokens.device))


class Drops(Model):
    def forward(self, tokens):
        return F.dropout(super().forward(tokens), 0.1)


class Penalised(Model):  # as a mixture of experts: logits and a penalty, and no targets
    def forward(self, tokens):
        return super().forward(tokens), self.head.weight.square().mean()


class Aimless(Model):  # as a pooler that nobody reads
    def __init__(self):
        super().__init__()
        self.pooler = nn.Linear(32, 32)

    def forward(self, tokens):
        self.pooler(self.embedding(tokens))
        return super().forward(tokens)


class Doubtful(Model):
    def forward(self, tokens):
        return self.embedding(tokens), super().forward(tokens)


class Masked(Model):
    def forward(self, tokens, mask):
        return super().forward(tokens)


class Passing(Model):
    def forward(self, *args):
        return super().forward(*args)


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def make(layers=1, width=32, dropout=0.0):
    return Model(width=width, layers=layers, dropout=dropout)


def odd():
    return Model(width=30)


def unlike():
    model = Model()
    with torch.no_grad():
        model.head.bias.fill_(unlike.calls)
    unlike.calls += 1
    return model


unlike.calls = 0


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 3)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)))


class Short(Model):  # which says nowhere how long a sequence may be
    def __init__(self):
        super().__init__()
        self.register_buffer("places", torch.zeros(80, 64))

    def forward(self, tokens):
        return super().forward(tokens) + self.places[: tokens.shape[1]]


def no_number():
    model = Model()
    torch.nn.init.constant_(model.head.bias, float("nan"))
    return model


def draw(batch, tokens, generator, device):
    x = torch.randn(batch, tokens, 16, generator=generator, device=device)
    return x, torch.randn(batch, tokens, 16, generator=generator, device=device)


def squares(out, targets):
    return (out.float() - targets).square().mean()


def squares_apart(out, targets):
    return squares(out, targets).reshape(1, 1)


def one_tensor(batch, tokens, generator, device):
    return torch.zeros(batch, tokens)


def depends_on_numbers():
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 2)]
    return Model(dropout=rates[0])


def raises():
    raise RuntimeError("no such thing")


def raises_in_colour():
    raise RuntimeError("\\x1b[31mred\\x07\\n\\x1b[0m")


def no_module():
    return 3


class Aside(nn.Module):
    def __init__(self, trained):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.mix = [torch.eye(16).requires_grad_(trained)]

    def forward(self, tokens):
        return self.head(self.embedding(tokens) @ self.mix[0])


def weight_in_a_list():
    return Aside(True)


def constant_in_a_list():
    return Aside(False)


def no_loss():
    return nn.Sequential(nn.Embedding(64, 16), nn.Flatten())


def needs_a_package():
    import a_package_that_nobody_has


def asks(width):
    return Model(width=width)


def on_a_gpu():
    return Model().cuda()


def on_a_gpu_by_torch_with_cuda():
    raise RuntimeError("_apply(): Couldn't swap Embedding.weight")  # torch 2.11 with CUDA, of weights without memory


def exits():
    raise SystemExit(3)


def frozen():
    return Model().requires_grad_(False)


def huge():
    return Model(width=2**17, layers=64)
"""
