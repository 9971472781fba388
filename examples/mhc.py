"""Several residual streams instead of one: the sub-layers of a small language model, each in LigerMHC.

    python examples/mhc.py                    4 streams
    python examples/mhc.py --streams 1        the same model with one

`LigerMHC(layer, hc=streams, c=width)` wraps any layer that keeps the shape of its input; it replaces
x + layer(x). The text is this package's own source, the tokens are its bytes.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import liger_kernel
from liger_kernel.transformers import LigerMHC, LigerRMSNorm

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = LigerRMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def mlp(width: int) -> nn.Module:
    up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    return nn.Sequential(LigerRMSNorm(width), up, nn.GELU(), down)


class Model(nn.Module):
    def __init__(self, streams: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.streams = streams
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        parts = [part for _ in range(layers) for part in (Attention(width, 4), mlp(width))]
        self.layers = nn.ModuleList(
            LigerMHC(part, hc=streams, c=width, phi_dtype=torch.float32, allow_fp32=True)
            for part in parts
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).unsqueeze(-2).repeat(1, 1, self.streams, 1)  # [B, T, streams, width]
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(-2))


def batches(size: int, length: int) -> Iterator[Tensor]:
    """Endless random windows of the text."""
    text = b"".join(p.read_bytes() for p in sorted(Path(liger_kernel.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    while True:
        starts = torch.randint(len(data) - length - 1, (size, 1))
        yield data[starts + torch.arange(length + 1)].long().to(DEVICE)


def train(streams: int, steps: int, size: int = 8, length: int = 64) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    model = Model(streams).to(DEVICE)
    for (
        name,
        parameter,
    ) in model.named_parameters():  # phi may be 16-bit; b and the alphas stay fp32
        if not name.endswith((".b", ".alpha_pre", ".alpha_post", ".alpha_res")):
            parameter.data = parameter.data.to(DTYPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step, batch in zip(range(steps), batches(size, length), strict=False):
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step:4d}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    train(options.streams, options.steps)
