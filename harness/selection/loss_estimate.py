"""Joint estimate of the losses of several files that were scored on the same few images.

The loss of a file on few images is uncertain by about a point, and the fastest of the files that seem to be within a
bound is often one whose measured loss is too small by chance. The error of a file's outputs is much less uncertain, and
the loss of a metric grows with it. So the measured loss of each file is averaged with the loss that its output error
predicts, each weighted by its precision (Fay and Herriot 1979, "Estimates of income for small places", section 2; the
variance between files by moments as in DerSimonian and Laird 1986). On many images the estimate is the measured loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_VARIANCE_SHARE = 0.25
"""Smallest variance of a loss relative to the mean variance: zero changed answers on few images prove nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLoss:
    """Loss of a metric on some images, and the error of the outputs.

    Attributes:
        loss: Loss of the metric relative to the float model, positive if the file is worse.
        stderr: Standard error of the loss over images.
        sqnr_db: SQNR of the outputs relative to the float model's, in dB, on calibration samples to which no range or
            weight of the file was fitted. It is slightly too large, because recovery chooses between files by it.
    """

    loss: float
    stderr: float
    sqnr_db: float


def estimate_losses(files: Sequence[MeasuredLoss]) -> list[float]:
    """Return the estimated loss of each file, in the unit of the measured losses.

    Args:
        files: Files of one model, scored on the same images.
    """
    if not files:
        return []
    loss = np.array([file.loss for file in files])
    error = 10.0 ** (-np.array([file.sqnr_db for file in files]) / 20)  # relative amplitude
    variance = np.array([file.stderr**2 for file in files])
    if not variance.any():
        return [file.loss for file in files]
    variance = np.maximum(variance, MIN_VARIANCE_SHARE * variance.mean())
    weight = 1 / variance
    information = float(weight @ error**2)
    rate = max(0.0, float(weight @ (error * loss)) / information)
    residual = loss - rate * error
    freedom = float(weight.sum() - (weight**2) @ error**2 / information)
    excess = float(weight @ residual**2) - (len(files) - 1)
    between = max(0.0, excess / freedom) if freedom > 0 else 0.0
    estimated: list[float] = (rate * error + between / (between + variance) * residual).tolist()
    return estimated
