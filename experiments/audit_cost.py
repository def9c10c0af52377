"""Memory that an audit needs in addition to the model's own forward pass.

    python -m experiments.audit_memory                  # 12 layers of 12 heads x 64, 8 images of 64 x 64 tokens
    python -m experiments.audit_memory --layers 2

The model is a plain `nn.TransformerEncoder` of the size of ViT-B with random weights. Forward pass and audit run in
separate processes. PyTorch's fast path for inference is disabled in both, because on a CPU it materialises all
attention probabilities of a layer. With 12 layers, one step takes minutes on a CPU, and each of the two steps runs
three times.
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn

from attnconv.inspect import audit
from benchmarks.measure import memory_of

SIDE, HEADS, WIDTH, BATCH = 64, 12, 768, 8


def prepare(contender: str, layers: int) -> Callable[[], object]:
    """Return the function to measure, for `forward` or `audit`."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, activation="gelu", batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
    tokens = torch.randn(BATCH, SIDE * SIDE, WIDTH)

    @torch.no_grad()
    def forward() -> object:
        torch.backends.mha.set_fastpath_enabled(False)
        return model(tokens)

    def audited() -> object:
        return audit(model, tokens, batch=BATCH, grid=(SIDE, SIDE))

    return {"forward": forward, "audit": audited}[contender]


def main() -> None:
    """Measure memory of the forward pass and of the audit, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="number of layers of the encoder")
    arguments = parser.parse_args()
    names = ("forward", "audit")
    cases = {name: {"contender": name, "layers": arguments.layers} for name in names}
    found = {name: memory_of("experiments.audit_memory", case) for name, case in cases.items()}
    print(f"{arguments.layers} layers, {BATCH} images of {SIDE} x {SIDE} tokens, torch {torch.__version__}")
    for name, memory in found.items():
        print(f"{name:<8}  step {memory.step / 2**20:7.0f} MiB  tensors {memory.tensors / 2**20:7.0f} MiB")
    extra = found["audit"].step - found["forward"].step
    print(f"additional memory of the audit: {extra / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
