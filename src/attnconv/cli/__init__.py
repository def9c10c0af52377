"""The command line: `attnconv COMMAND`, one file per command: its dataclass of arguments, and `run` with them.

`--help` answers without importing torch: commands import in their bodies what they run. Errors that a user can cause
are printed without a traceback, with status 2 for a wrong call and 1 for a failure at work.
"""

import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence

from attnconv._util.errors import printable
from attnconv._util.exports import missing
from attnconv._util.settings import SettingsError
from attnconv.cli.parsing import in_flags, parse

COMMANDS = {
    "demo": "see convolution performed and learned, in three minutes and without a network",
    "train": "train a preset and leave a run folder",
    "evaluate": "measure the test accuracy of a run or checkpoint",
    "predict": "name the classes that a model sees in an image",
    "report": "draw the figures of a run, and one HTML page of them",
    "reproduce": "train the paper's models at a chosen scale, and draw its figures and tables",
    "prove": "perform convolutions by attention and compare, random ones or a network's",
    "recast": "write a network whose convolutions are attention",
    "audit": "measure how convolutional the attention of any model is, with figures",
    "explore": "see what the heads of a model do, on a live page",
    "prune": "remove degenerate heads from a trained model",
    "calibrate": "measure how fast this machine computes, so that layers choose the faster form",
    "models": "list the presets with their parameters and FLOPs",
}
_WIDTH = max(map(len, COMMANDS))
_COMMANDS = "\n".join(f"  {name:<{_WIDTH}}  {text}" for name, text in COMMANDS.items())
_HELP = f"""\
usage: attnconv [-h] [--version] COMMAND ...

Self-attention that performs convolution, and learns it.

commands:
{_COMMANDS}

`attnconv COMMAND --help` lists its options.

examples:
  attnconv demo
  attnconv train quadratic-digits
  attnconv train quadratic-small --data.root PATH/TO/CIFAR --epochs 20 --out runs/first
  attnconv evaluate runs/first --data.root PATH/TO/CIFAR
  attnconv report runs/first
  attnconv reproduce --scale tiny
  attnconv prove
  attnconv recast torchvision:resnet18 --pretrained --out resnet18-attention.safetensors
  attnconv audit timm:vit_tiny_patch16_224 --pretrained --data PATH/TO/PICTURES
  attnconv explore runs/first
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and end the process with its status: 130 after Ctrl-C, 143 after SIGTERM."""
    try:
        status = _answer(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more as it ends
        status = 1
    sys.exit(status)


def _answer(words: list[str]) -> int:
    """Return the status of a command line, after doing what it says."""
    if not words or words[0] in ("-h", "--help"):
        print(_HELP)
        return 0 if words else 2
    if words[0] == "--version":
        from attnconv import __version__

        print(f"attnconv {__version__}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        print(f"attnconv: there is no command {name!r}. The commands are {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    return _run(name, rest)


class TerminatedError(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does, with another status."""


def _terminate(*_: object) -> None:
    raise TerminatedError


def _run(name: str, words: list[str]) -> int:
    """Return a command's status, and print its errors as sentences."""
    in_main = threading.current_thread() is threading.main_thread()  # only there may signals be handled
    before = signal.signal(signal.SIGTERM, _terminate) if in_main else None
    try:
        command = importlib.import_module(f"attnconv.cli.{name}_command")
        return int(command.run(parse(command.Arguments, words)) or 0)
    except KeyboardInterrupt as stop:
        from attnconv.training.processes import is_first_process

        if is_first_process():
            print(in_flags(str(stop)) or "attnconv: stopped.", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(stop, TerminatedError) else signal.SIGINT)
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError) as error:
        if isinstance(error, ModuleNotFoundError):
            error = missing(error, on_command_line=True) or error
        print(f"attnconv {name}: {printable(in_flags(str(error)), lines=True)}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)
