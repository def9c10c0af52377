"""`attnconv demo`: convert a convolution to attention, train a small model, and draw its heads."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from attnconv._util.errors import bad
from attnconv._util.settings import Natural
from attnconv.cli.output import resumed_by
from attnconv.training.recipes import recipe
from attnconv.training.run_folder import RunFolder, writing

PRESET = "quadratic-digits"


@dataclass(frozen=True)
class Arguments:
    """Show that attention can express a convolution, and can learn to behave like one.

    The command converts a random convolution to an attention layer and compares their outputs, trains a small
    attention-only model on handwritten digits, and draws the positions that its heads attend to. This takes under three
    minutes on two idle CPU cores and needs no internet connection.

    Examples:
        attnconv demo
        attnconv demo --epochs 5 --out runs/short-demo

    Attributes:
        out: Run folder. It must be new or empty, or contain only an earlier demo, which is then replaced.
        epochs: Number of training epochs. `attnconv train quadratic-digits` trains for 35 and is more accurate.
    """

    out: Path = Path("runs/demo")
    epochs: Natural = 20


def run(arguments: Arguments) -> None:
    """Compare attention with a convolution, train a model, and write its report."""
    settings = recipe(PRESET)
    settings = replace(settings, train=replace(settings.train, epochs=arguments.epochs))
    _make_room(arguments.out)
    _perform()
    from attnconv.report import write_report
    from attnconv.training.fitting import fit

    print(f"\n2. Training an attention-only model ({PRESET} on scikit-learn's digits)", flush=True)
    with resumed_by(f"`attnconv train {PRESET} --out {arguments.out} --resume`"):
        result = fit(settings, arguments.out, command=["attnconv", "demo"]).result()
    assert result is not None  # because the training is complete
    print(f"   test accuracy {result['last']['test']['accuracy']:.2%} after the last epoch")
    print("\n3. The positions that its heads attend to")
    print(f"   Report: {write_report(arguments.out).resolve()}")


def _perform() -> None:
    import torch

    from attnconv.convert import from_conv

    print("1. Attention expresses a convolution")
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        conv = torch.nn.Conv2d(16, 32, kernel_size=3, padding=1, dtype=dtype)
        layer, image = from_conv(conv), torch.randn(4, 16, 20, 28, dtype=dtype)
        with torch.no_grad():
            attended, convolved = layer(image), conv(image)
        error = float((attended - convolved).abs().max() / convolved.abs().max())
        heads = f"{layer.heads} heads in {str(dtype).removeprefix('torch.')}"
        print(f"   a random 3 x 3 convolution as {heads}: maximum relative difference {error:.1e}")


def _make_room(folder: Path) -> None:
    """Remove an earlier demo from the folder; raise `ValueError` if the folder contains anything else."""
    run = RunFolder(folder)
    with writing(run):
        is_demo = run.exists() and run.record().get("command") == ["attnconv", "demo"]
        foreign = run.foreign_files()
        if not run.is_empty() and (foreign or not is_demo):
            contents = foreign[0].relative_to(folder) if is_demo else "other files"
            got, fix = f"{folder}, which contains {contents}", "Pass a different folder."
            raise ValueError(bad("--out", "must be new or empty, or contain only an earlier demo", got, fix))
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path != run.lock_file:
                path.unlink()
