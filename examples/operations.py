"""One feed-forward block in plain torch, with torch's operations and with Tempo's: python examples/operations.py

Needs torch only. Prints how many bytes autograd keeps for backward in each, and that the results agree.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.norm import layer_norm
from tempo_kernels.philox import derive_key

S, B, H = 512, 2, 256  # tokens per sample, samples, hidden size
SEED, LAYER, SITE = 1234, 1, 0


class Block(nn.Module):
    """x + dropout(linear(gelu(linear(norm(x))))), as torch has it."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.p = nn.LayerNorm(H), nn.Linear(H, 4 * H), nn.Linear(4 * H, H), p

    def forward(self, x: Tensor, first_sample: int = 0) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.p, self.training)


class TempoBlock(Block):
    """The same weights. Each operation keeps what the next linear keeps anyway, or draws its mask anew."""

    def forward(self, x: Tensor, first_sample: int = 0) -> Tensor:
        y = layer_norm(x, self.norm.weight, self.norm.bias, self.norm.eps)
        y = F.linear(gelu(F.linear(y, self.up.weight), self.up.bias), self.down.weight)
        p = self.p if self.training else 0.0
        # The mask depends on the key and on the sample's number, not on how the samples are batched.
        return bias_dropout_add(y, self.down.bias, x, p=p, key=derive_key(SEED, LAYER, SITE), first_sample=first_sample)


def kept_bytes(block: Block, x: Tensor) -> int:
    """Bytes of the distinct storages that autograd holds after the forward; not the input's and the weights' own."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    # The result has to live while the storages are counted, or the next one may get a freed one's address.
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = block(x)
    for tensor in (x, *block.parameters()):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    assert result.requires_grad
    return sum(storages.values())


def main() -> None:
    torch.manual_seed(SEED)
    x = torch.randn(S, B, H, requires_grad=True)
    stock, tempo = Block(p=0.1), TempoBlock(p=0.1)
    tempo.load_state_dict(stock.state_dict())
    for name, block in (("torch", stock), ("Tempo", tempo)):
        num_bytes = kept_bytes(block, x)
        print(
            f"{name}: {num_bytes:>10,} bytes kept for backward, {num_bytes / (S * B * H):.2f} per token and hidden unit"
        )

    for block in (stock, tempo):
        block.eval()
    grads = [torch.autograd.grad(block(x).square().mean(), [x, *block.parameters()]) for block in (stock, tempo)]
    worst = max(((a - b).abs().max() / b.abs().max()).item() for b, a in zip(*grads, strict=True))
    print(f"without dropout the gradients differ by at most {worst:.1e} of the largest")

    tempo.train()
    whole = tempo(x)
    halves = [tempo(x[:, i : i + 1], first_sample=i) for i in range(B)]
    assert torch.equal(whole == x, torch.cat(halves, dim=1) == x)
    print("with dropout one batch of two and two batches of one have the same masks")


if __name__ == "__main__":
    main()
