"""The learning rate's factor as a function of the optimiser step, in closed form.

Step t of T in all, counted from 0, with W = round(warmup * T) steps of warm-up:

    t < W        (t + 1) / W
    cosine       1/2 (1 + cos(pi (t - W) / (T - W)))
    linear       1 - (t - W) / (T - W)
    steps        decay ^ (number of milestones m with m * steps_per_epoch <= t)
    constant     1

The factor changes at every step. The paper's code stepped once per epoch, so that its first epoch ran at rate 0.
"""

import math

from attnconv.training.settings import ScheduleSettings


def factor(schedule: ScheduleSettings, step: int, *, steps_per_epoch: int, epochs: int) -> float:
    """The learning rate's factor, from 0 to 1, at an optimiser step from 0; after the last step it stays as it is."""
    total = steps_per_epoch * epochs
    warmup = round(schedule.warmup * total)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "steps":
        passed = sum(milestone * steps_per_epoch <= step for milestone in schedule.milestones)
        return float(schedule.decay**passed)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if schedule.name == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
