"""Evaluators: mAP, top-1, mIoU, fidelity and custom metrics, with confidence intervals.

May import `accuracy.data` and the contracts.
Must not import a runtime: an evaluator is given a callable engine.
"""
