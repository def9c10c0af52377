"""`attnconv demo`: attention performs a convolution, attention learns, and figures of where its heads went."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from attnconv._util.errors import bad
from attnconv._util.settings import Natural
from attnconv.training.recipes import recipe
from attnconv.training.run_folder import RunFolder, writing

PRESET = "quadratic-digits"


@dataclass(frozen=True)
class Arguments:
    """Show in three minutes on two CPU cores, without a network, that attention performs and learns convolution.

    Builds the attention layer that equals a random convolution, trains a small attention-only model on handwritten
    digits, and draws where its heads went.

    Examples:
        attnconv demo
        attnconv demo --epochs 5 --out runs/x

    Attributes:
        out: Run folder; an earlier demo in it is replaced, unless it holds files of yours.
        epochs: Epochs of training; None for the recipe's.
    """

    out: Path = Path("runs/demo")
    epochs: Natural | None = None


def run(arguments: Arguments) -> None:
    """Perform a convolution, learn one, draw what was learned."""
    settings = recipe(PRESET)
    if arguments.epochs is not None:
        settings = replace(settings, train=replace(settings.train, epochs=arguments.epochs))
    _make_room(arguments.out)
    _perform()
    from attnconv.report import write_report
    from attnconv.training.fitting import fit

    print(f"\n2. Attention learns ({PRESET} on scikit-learn's digits, {settings.train.epochs} epochs)", flush=True)
    result = fit(settings, arguments.out, command=["attnconv", "demo"]).result()
    assert result is not None  # fit has ended
    print(f"   test accuracy {result['last']['test']['accuracy']:.2%} after the last epoch")
    print("\n3. What its heads look at")
    print(f"   Report: {write_report(arguments.out).resolve()}")


def _perform() -> None:
    """Compare a random convolution with the attention layer that equals it."""
    import torch

    from attnconv.convert import from_conv

    print("1. Attention performs convolution")
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        conv = torch.nn.Conv2d(16, 32, kernel_size=3, padding=1, dtype=dtype)
        layer, image = from_conv(conv), torch.randn(4, 16, 20, 28, dtype=dtype)
        with torch.no_grad():
            attended, convolved = layer(image), conv(image)
        error = float((attended - convolved).abs().max() / convolved.abs().max())
        heads = f"{layer.heads} heads in {str(dtype).removeprefix('torch.')}"
        print(f"   a random 3 x 3 convolution as {heads}: largest relative difference {error:.1e}")


def _make_room(folder: Path) -> None:
    """Remove an earlier demo; anything else in the folder stays and stops the demo."""
    run = RunFolder(folder)
    with writing(run):
        is_demo = run.exists() and run.record().get("command") == ["attnconv", "demo"]
        foreign = run.foreign_files()
        if not run.is_empty() and (foreign or not is_demo):
            held = foreign[0].relative_to(folder) if is_demo else "other things"
            got, fix = f"{folder}, which holds {held}", "Name another folder with --out."
            raise ValueError(bad("--out", "must be new, empty or an earlier demo", got, fix))
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path != run.lock_file:
                path.unlink()
