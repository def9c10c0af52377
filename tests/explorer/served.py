"""The explorer's server as the command runs it, with a small model: `python -m tests.explorer.served`."""

import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from attnconv import SelfAttention2d
from attnconv.cli.explore_command import Arguments, _serve
from attnconv.explorer import Session
from tests.explorer.pages import PAGE

SIZES = (1024, 1024)  # so large that the decoder cannot reduce the largest JPEG
PAYLOAD_BYTES = 8_000_000  # far more than a connection buffers


def slow(session: Session) -> Callable[..., bytes]:
    """Return the session's `answer` function, which first sleeps for a minute if the type ends in `slow`."""

    def answer(content: bytes, kind: str, heads: str | None = None) -> bytes:
        if kind.endswith("slow"):
            time.sleep(60)
        return session.answer(content, kind, heads)

    return answer


def main() -> None:
    """Serve until interrupted."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 64, stride=64), SelfAttention2d(8, 4, heads=2))
    session = Session(model, SIZES, mean=(0.5,) * 3, std=(0.5,) * 3)
    sys.exit(_serve(Arguments(port=0, browser=False), bytes(PAYLOAD_BYTES), slow(session), PAGE))


if __name__ == "__main__":
    main()
