"""Chance level of the convolution score, for heads whose queries each attend to one random position (the worst case).

    python -m experiments.chance_scores                 # the table in docs/how-convolutional.md, about a minute
    python -m experiments.chance_scores --draws 200 --heads 6

Each cell has the mean over random layers, with the maximum in brackets. If n queries can attend to a shift, a random
head with m keys attends to it for a fraction Binomial(n, 1/m) / n of them. The score uses the best of about m shifts
per head; the most distant shifts have n = m / 2^axes.
"""

import argparse

import torch

from attnconv import Dense, Grid
from attnconv.inspect import convolution_score, shift_profile

SIZES = ((14, 14), (7, 7), (14,))
HEADS = (3, 4, 8, 9, 12, 16, 36)
IMAGES = (1, 4)


def chance(sizes: tuple[int, ...], heads: int, images: int, *, draws: int) -> list[float]:
    """Return the scores of random layers."""
    grid, generator = Grid.make(sizes), torch.Generator().manual_seed(0)
    keys = grid.key_count
    found = []
    for _ in range(draws):
        attended = torch.randint(keys, (images, heads, keys), generator=generator)
        found.append(convolution_score(shift_profile(Dense(grid, torch.eye(keys)[attended]))))
    return found


def main() -> None:
    """Print the table for the documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=40, help="number of random layers per cell")
    parser.add_argument("--heads", type=int, nargs="+", default=HEADS, help="numbers of heads")
    arguments = parser.parse_args()
    cases = [(sizes, images) for sizes in SIZES for images in IMAGES]
    titles = [f"{' x '.join(map(str, sizes))}, {images} image{'s' * (images > 1)}" for sizes, images in cases]
    print(f"| heads | {' | '.join(titles)} |")
    print("|---" * (1 + len(cases)) + "|")
    for heads in arguments.heads:
        scores = [chance(sizes, heads, images, draws=arguments.draws) for sizes, images in cases]
        cells = [f"{sum(some) / len(some):.3f} ({max(some):.3f})" for some in scores]
        print(f"| {heads} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
