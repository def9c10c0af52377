"""`attnconv explore [MODEL]`: a live page of what the heads of a model do, served or written."""

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
    """Show what every head of a model does on a live page: on your own images, over the training, beside the theorem.

    Serves the page on this machine only, or writes one that needs no server.

    Examples:
        attnconv explore
        attnconv explore runs/first --data PATH/TO/PICTURES
        attnconv explore quadratic-digits --export shown
        attnconv explore timm:vit_tiny_patch16_224 --pretrained --data PATH/TO/PICTURES --layers blocks.0.attn

    Attributes:
        model: Preset, run folder, checkpoint, timm:NAME, hf:NAME, torchvision:NAME or package.module:function; None for
            the run of `attnconv demo`, or where there is none, for what such a run left in the package.
        data: Initial images: a folder of pictures, digits or cifar10. None takes the digits where a run was trained
            on them, and noise for a model whose attention depends on positions only.
        snapshots: Most epochs of a run to show its heads at; 0 for none.
        budget: Megabytes for each image that content and rows of attention may take. Where not all rows fit, those of
            an even lattice of queries are kept.
        export: Write the page into this folder, new or of an earlier export, instead of serving it: it opens from disk
            and can be hosted.
        port: Port of the server, on this machine only; 0 for any port that is free.
        browser: Open the page in a browser.
    """

    model: Positional[str | None] = None
    snapshots: NotNegative = 24
    budget: Annotated[float, Meta(ge=SMALLEST, le=10_000)] = 3.5
    export: Path | None = None
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8765
    browser: bool = True


def run(arguments: Arguments) -> None:
    """Load the model, inspect its attention, then serve or write the page."""
    require_room("--export", arguments.export)
    from attnconv.explorer import export, find_page

    page = find_page()  # before any work: without it there is nothing to show
    content, answer = _look(arguments)
    if arguments.export is not None:
        mark(arguments.export)
        print(f"Explorer: {export(content, arguments.export)}")
    else:
        _serve(arguments, content, answer, page)


def _look(arguments: Arguments) -> tuple[bytes, Any]:
    """The payload, and the function that answers a visitor's picture if there is a model."""
    from attnconv.explorer import Pictures, Session, example, payload, snapshots_of
    from attnconv.inspect import audit
    from attnconv.models.presets import PRESETS
    from attnconv.training.run_folder import RunFolder

    demo = DemoArguments().out
    name = arguments.model or (str(demo) if RunFolder(demo).exists() else None)
    if name is None and arguments.data is not None:
        raise ValueError(bad("MODEL", "must be named to look at --data", "none", "See `attnconv explore --help`."))
    if name is None:
        print("Explorer: an example that comes with the package. Name a model to look at, or run `attnconv demo`.")
        return example(), None
    subject = Subject.load(name, arguments)
    model, reading = subject.loaded.model, arguments.reading()
    run = None if name in PRESETS else RunFolder.holding(Path(name))
    snapshots = () if run is None or arguments.snapshots == 0 else snapshots_of(run, arguments.snapshots)
    budget = max(1, round(arguments.budget * 1e6))
    options = {**reading, "budget": budget, "title": title_of(name), "snapshots": snapshots}

    on_digits = run is not None and run.settings().data.name == "digits"
    data = arguments.data or ("digits" if on_digits else None)
    found, (mean, std) = (None, subject.normalisation) if data is None else subject.images(data, arguments)
    session = Session(model, subject.sizes, mean=mean, std=std, options=options)
    if found is None:
        noise = subject.noise(2)
        require_positions_only(audit(model, noise, queries=1, **reading))
        return payload(model, noise, pictures=Pictures.none(), **options), session.answer
    return session.payload(found.pixels, found.names), session.answer


def title_of(name: str) -> str:
    """MODEL as it was named; of a path the last two parts, since a page that is put on the web shows its title."""
    library, colon, rest = name.partition(":")
    if colon and library in ("timm", "hf", "torchvision"):
        return f"{library}:{title_of(rest)}"
    path = Path(name)
    return "/".join(part for part in path.parts[-2:] if part != path.anchor)


def _serve(arguments: Arguments, content: bytes, answer: Any, page: str) -> None:
    """Serve until interrupted."""
    import threading
    import webbrowser

    from attnconv.explorer import app, listen, server_for

    at_work = threading.Lock()

    def answered(content: bytes, kind: str) -> bytes:
        with at_work:
            found: bytes = answer(content, kind)
            return found

    place = listen(arguments.port)
    port = place.getsockname()[1]
    server = server_for(app(content, None if answer is None else answered, port=port, page=page))
    address = f"http://127.0.0.1:{port}/"
    print(f"Explorer: {address} (on this machine alone; Ctrl-C ends it)", flush=True)
    if arguments.browser:
        webbrowser.open(address)
    try:
        server.run(sockets=[place])
    except KeyboardInterrupt:
        print("Explorer: ended.", flush=True)
        if at_work.locked():
            os._exit(0)  # the interpreter would wait for the model, however long that takes
