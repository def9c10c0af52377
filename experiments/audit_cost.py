"""Time and memory of an audit, compared with those of the model's own forward pass.

    python -m experiments.audit_cost                                # all models below
    python -m experiments.audit_cost vit_base_patch16_224 --rounds 3

Models are named as in timm and have random weights; 16 images run in batches of 8. `encoder` is a plain
`nn.TransformerEncoder` of the size of ViT-B with 8 images of 64 x 64 tokens, whose forward pass takes minutes on a CPU;
only its memory is measured. PyTorch's fast path for inference is disabled, because on a CPU it materialises all
attention probabilities of a layer. Memory is measured in separate processes.
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn

from attnconv.inspect import audit
from benchmarks.measure import Ratio, interleaved, memory_of
from experiments.torchvision_operators import declare_missing

ENCODER = "encoder"
MODELS = ("vit_base_patch16_224", "swin_base_patch4_window7_224", "maxvit_tiny_tf_224", ENCODER)
IMAGES, BATCH = 16, 8
SIDE, HEADS, WIDTH, LAYERS = 64, 12, 768, 12


def prepare(contender: str, name: str) -> Callable[[], object]:
    """Return the function to measure, for `forward` or `audit`."""
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)
    if name == ENCODER:
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, activation="gelu", batch_first=True, norm_first=True
        )
        model: nn.Module = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()
        images, grid = torch.randn(BATCH, SIDE * SIDE, WIDTH), (SIDE, SIDE)
    else:
        declared = declare_missing()
        import timm

        model = timm.create_model(name).eval()
        del declared
        images, grid = torch.randn(IMAGES, *timm.get_pretrained_cfg(name).input_size), None

    @torch.no_grad()
    def forward() -> None:
        for some in images.split(BATCH):
            model(some)

    def audited() -> object:
        return audit(model, images, batch=BATCH, grid=grid)

    return {"forward": forward, "audit": audited}[contender]


def main() -> None:
    """Measure the forward pass and the audit of each model, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, help="names in timm, or encoder")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds for the times")
    arguments = parser.parse_args()
    torch.set_flush_denormal(True)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("| model | time ratio | memory of the forward pass | of the audit | ratio | process with the audit | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.models:
        time = "-"
        if name != ENCODER:
            steps = {contender: prepare(contender, name) for contender in ("audit", "forward")}
            found = interleaved(steps, arguments.rounds)
            ratio = Ratio.of(found["audit"], found["forward"])
            time = f"{ratio.value:.2f} ({ratio.least:.2f} to {ratio.most:.2f})"
        memory = [
            memory_of("experiments.audit_cost", {"contender": contender, "name": name})
            for contender in ("forward", "audit")
        ]
        cells = [name, time]
        for kind in ("step", "process"):
            one, two = (getattr(each, kind) / 2**20 for each in memory)
            cells += ([f"{one:,.0f} MiB"] if kind == "step" else []) + [f"{two:,.0f} MiB", f"{two / one:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
