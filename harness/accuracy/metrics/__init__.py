"""Metrics: mAP, top-1, mIoU, fidelity, with their confidence intervals."""
