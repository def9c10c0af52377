"""Command-line interface: `attnconv COMMAND`, with one module per command.

Each module has a dataclass `Arguments` and a function `run`. Commands import torch only in `run`, so that `--help` is
fast. Errors that a user can cause are printed without a traceback. The exit status is 2 for arguments that cannot be
parsed and for invalid settings, and 1 for any other failure.
"""

import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence

from attnconv._util.errors import did_you_mean, printable
from attnconv._util.exports import missing
from attnconv._util.openmp import limit_spinning
from attnconv._util.settings import SettingsError
from attnconv.cli.parsing import in_flags, parse

COMMANDS = {
    "demo": "convert a convolution to attention, and train a small model",
    "train": "train a model from a preset and write a run folder",
    "evaluate": "measure the accuracy and the loss of a model",
    "predict": "classify an image",
    "report": "draw the figures of a run, and write an HTML page",
    "reproduce": "train the paper's models, and reproduce its figures and tables",
    "prove": "compare convolutions with equivalent attention layers",
    "recast": "replace the convolutions of a network with attention",
    "audit": "measure how closely the attention of a model resembles convolution",
    "ablate": "measure what each head contributes to the output of a model",
    "explore": "inspect the heads of a model on an interactive page",
    "prune": "remove heads with degenerate attention from a trained model",
    "calibrate": "measure this machine's speed to choose the faster algorithms",
    "models": "list the presets with their parameter and FLOP counts",
    "completion": "print a shell completion script",
}
_WIDTH = max(map(len, COMMANDS))
_COMMANDS = "\n".join(f"  {name:<{_WIDTH}}  {text}" for name, text in COMMANDS.items())
_HELP = f"""\
usage: attnconv [-h] [-V] COMMAND ...

Self-attention layers that can express any convolution. In all help texts,
"the paper" is https://arxiv.org/abs/1911.03584 (Cordonnier, Loukas and Jaggi,
ICLR 2020).

commands:
{_COMMANDS}

options:
  -h, --help     print this help
  -V, --version  print the version

To list the options of a command: attnconv help COMMAND, or attnconv COMMAND -h.

examples:
  attnconv demo
  attnconv train quadratic-digits
  attnconv train quadratic-small --data-root data --epochs 20 --out runs/first
  attnconv evaluate runs/first
  attnconv report runs/first
  attnconv explore runs/first
  attnconv reproduce --scale tiny
  attnconv recast torchvision:resnet18 --pretrained --out resnet18.safetensors
  attnconv audit timm:vit_tiny_patch16_224 --pretrained --data PATH/TO/IMAGES
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its status, which is 130 after Ctrl-C and 143 after SIGTERM."""
    limit_spinning()
    try:
        status = _status(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at exit
        status = 1
    sys.exit(status)


def _status(words: list[str]) -> int:
    while words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(_HELP)
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from attnconv import __version__

        print(f"attnconv {__version__}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        fix = did_you_mean(name, COMMANDS) or f"The commands are {', '.join(COMMANDS)}."
        print(f"attnconv: unknown command {name!r}. {fix}", file=sys.stderr)
        return 2
    return _run(name, rest)


class TerminatedError(KeyboardInterrupt):
    """Interruption by SIGTERM, which has a different exit status from Ctrl-C."""


def interrupted(stop: KeyboardInterrupt) -> int:
    """Return the exit status after an interruption."""
    return 128 + (signal.SIGTERM if isinstance(stop, TerminatedError) else signal.SIGINT)


def _terminate(*_: object) -> None:
    raise TerminatedError


def _run(name: str, words: list[str]) -> int:
    in_main = threading.current_thread() is threading.main_thread()  # signal handlers can be set only there
    before = signal.signal(signal.SIGTERM, _terminate) if in_main else None
    arguments = None
    try:
        command = importlib.import_module(f"attnconv.cli.{name}_command")
        arguments = command.Arguments
        return int(command.run(parse(arguments, words)) or 0)
    except KeyboardInterrupt as stop:
        from attnconv._util.processes import is_first_process

        if is_first_process():
            print(in_flags(str(stop)) or "attnconv: stopped.", file=sys.stderr)
        return interrupted(stop)
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError) as error:
        if isinstance(error, ModuleNotFoundError):
            error = missing(error, on_command_line=True) or error
        print(f"attnconv {name}: {printable(in_flags(str(error), arguments), lines=True)}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)
