"""`attnconv explore [MODEL]`: serve or write an interactive page about the heads of a model."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from attnconv._util.errors import bad
from attnconv._util.settings import SMALLEST, NotNegative
from attnconv.cli.demo_command import Arguments as DemoArguments
from attnconv.cli.image_inputs import AttentionOptions, Subject, require_positions_only
from attnconv.cli.output import mark, require_room
from attnconv.cli.parsing import Positional


@dataclass(frozen=True, kw_only=True)
class Arguments(AttentionOptions):
    """Inspect the heads of a model on an interactive page, for your own images and over the epochs of a run.

    The page is served to this machine only, or written as files that need no server.

    Examples:
        attnconv explore
        attnconv explore runs/first --data PATH/TO/IMAGES
        attnconv explore quadratic-digits --export page
        attnconv explore timm:vit_tiny_patch16_224 --pretrained --data PATH/TO/IMAGES

    Attributes:
        model: Preset, run folder, weights file, hub:OWNER/NAME, timm:NAME, hf:NAME, torchvision:NAME or
            package.module:function. The default is the run of `attnconv demo` or, if there is none, a bundled model
            that was trained on CIFAR-10.
        data: Initial images: a folder of image files (searched recursively), digits or cifar10. The default is digits
            for runs trained on digits; otherwise, random noise if attention depends only on positions. Required in all
            other cases.
        snapshots: Maximum number of epochs of a run to show; 0 shows only the loaded weights.
        budget: Maximum size in MB (10^6 bytes) of the attention data stored for each image, for all layers together. If
            not all queries fit, only queries on an evenly spaced grid are stored.
        ablations: Also store the model's predictions with each head switched off or replaced with the nearest
            convolution, which runs the model twice per head. Without --export, the page asks the server for them.
        export: Write the page to this folder instead of serving it. The folder must be new, empty or written by an
            earlier export. The page can be opened from disk or hosted on a web server.
        port: Port of the server; 0 selects a free port.
        browser: Open the page in a browser.
    """

    model: Positional[str | None] = None
    snapshots: NotNegative = 24
    budget: Annotated[float, Meta(ge=SMALLEST, le=10_000)] = 3.5
    ablations: bool = False
    export: Path | None = None
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8765
    browser: bool = True


def run(arguments: Arguments) -> int:
    """Load the model, record its attention, and serve or write the page."""
    require_room("--export", arguments.export)
    from attnconv.explorer import export, find_page

    page = find_page()  # raises early if the page has not been built
    content, answer = _inspect(arguments)
    if arguments.export is None:
        return _serve(arguments, content, answer, page)
    mark(arguments.export)
    print(f"Explorer: {export(content, arguments.export)}")
    return 0


def _inspect(arguments: Arguments) -> tuple[bytes, Any]:
    """Return the payload, and the function that replies to an uploaded image, or None without a model."""
    from attnconv.explorer import Pictures, Session, Snapshot, example, payload, snapshots_of
    from attnconv.inspect import audit
    from attnconv.models.checkpoint import read_weights
    from attnconv.models.model_loader import checkpoint_file
    from attnconv.models.presets import PRESETS
    from attnconv.training.progress_bars import working
    from attnconv.training.run_folder import RunFolder

    demo = DemoArguments().out
    name = arguments.model or (str(demo) if RunFolder(demo).exists() else None)
    if name is None and arguments.data is not None:
        raise ValueError(bad("MODEL", "must be given if --data is given", "no model", "See `attnconv explore --help`."))
    if name is None:
        print("Explorer: showing the bundled example, a model trained on CIFAR-10. For other models, pass MODEL.")
        return example(), None
    subject = Subject.load(name, arguments)
    model, reading = subject.loaded.model, arguments.reading()
    run = None if name in PRESETS else RunFolder.holding(Path(name))
    snapshots: tuple[Snapshot, ...] = ()
    if run is not None and arguments.snapshots:
        file = checkpoint_file(Path(name)).resolve()
        extra = json.loads(read_weights(file).metadata.get("extra", "{}"))
        until = 0 if file == run.start_weights else extra.get("epoch")  # initial weights may be of a different run
        snapshots = snapshots_of(run, arguments.snapshots, until=until)
    budget = max(1, round(arguments.budget * 1e6))
    on_digits = run is not None and run.settings().data.name == "digits"
    data = arguments.data or ("digits" if on_digits else None)
    found, (mean, std) = (None, subject.normalisation) if data is None else subject.images(data, arguments)
    options = {
        **reading,
        "budget": budget,
        "title": title_of(name),
        "snapshots": snapshots,
        "classes": subject.loaded.classes or (() if found is None else found.classes),
        "random": subject.loaded.random,
        "ablations": arguments.ablations,
    }
    pixels = None if found is None else found.pixels
    session = Session(model, subject.sizes, mean=mean, std=std, examples=pixels, options=options)
    with working(f"Recording the attention of {name}"):
        if found is not None:
            return session.payload(found.pixels, found.names, found.labels), session.answer
        noise = subject.noise(2)
        require_positions_only(audit(model, noise, queries=1, **reading))
        return payload(model, noise, pictures=Pictures(), **options), session.answer


def title_of(name: str) -> str:
    """Return the page's title: MODEL, with paths shortened to their last two parts, since the page may be published."""
    library, colon, rest = name.partition(":")
    if colon and library in ("hub", "timm", "hf", "torchvision"):
        return f"{library}:{title_of(rest)}"
    path = Path(name)
    return "/".join(part for part in path.parts[-2:] if part != path.anchor)


def _serve(arguments: Arguments, content: bytes, answer: Any, page: str) -> int:
    """Serve the page until interrupted; return the exit status."""
    import threading
    import webbrowser

    from attnconv.cli import interrupted
    from attnconv.explorer import app, listen, server_for

    at_work = threading.Lock()

    def answered(content: bytes, kind: str, heads: str | None) -> Any:
        with at_work:
            return answer(content, kind, heads)

    place = listen(arguments.port)
    port = place.getsockname()[1]
    server = server_for(app(content, None if answer is None else answered, port=port, page=page))
    address = f"http://127.0.0.1:{port}/"
    print(f"Explorer: {address} (for this machine only; stop with Ctrl-C)", flush=True)
    if arguments.browser:
        webbrowser.open(address)
    try:
        server.run(sockets=[place])
    except KeyboardInterrupt as stop:
        print("Explorer: stopped.", flush=True)
        if at_work.locked():
            os._exit(interrupted(stop))  # otherwise the interpreter would wait for the model's forward pass
        return interrupted(stop)
    return 0
