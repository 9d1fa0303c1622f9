"""Train the detector of the zoo on the made-up shapes and export it: `python experiments/scripts/train_shapes.py`.

A small anchor-free detector in the manner of YOLOX (Ge et al. 2021, arXiv:2107.08430): CSP blocks with SiLU, a neck
that goes up once and down once, decoupled heads at strides 8 and 16. Cells are assigned to shapes as in TOOD (Feng et
al. 2021, arXiv:2108.07755), so that a score learns how well its box fits; boxes learn by CIoU (Zheng et al. 2020,
arXiv:1911.08287).

Takes about ten minutes on one core. The same seed on the same machine gives the same file. The layout of input and
output are documented in `harness.zoo.catalog`.
"""

from __future__ import annotations

import argparse
import logging
import math
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from harness.zoo.catalog import TRAINED_MODEL_PATH
from harness.zoo.shapes import CLASS_NAMES, IMAGE_SIZE_PX, ShapesSplit, draw_split

STRIDES = (8, 16)
SEED = 20
Tensor: TypeAlias = Any  # torch comes without types here
_log = logging.getLogger(__name__)


def conv(inputs: int, outputs: int, kernel: int = 1, *, stride: int = 1, groups: int = 1) -> Tensor:
    """Build a convolution without bias, BatchNormalization, SiLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03),
        nn.SiLU(),
    )


def separable(inputs: int, outputs: int, *, stride: int = 1) -> Tensor:
    """Build a depthwise 3x3 and a pointwise convolution."""
    return nn.Sequential(conv(inputs, inputs, 3, stride=stride, groups=inputs), conv(inputs, outputs))


class CSP(nn.Module):  # type: ignore[misc]
    """Cross stage partial block (Wang et al. 2020, arXiv:1911.11929) with one bottleneck."""

    def __init__(self, inputs: int, outputs: int, *, residual: bool = True) -> None:
        super().__init__()
        hidden = outputs // 2
        self.main, self.side = conv(inputs, hidden), conv(inputs, hidden)
        self.bottleneck = nn.Sequential(conv(hidden, hidden), conv(hidden, hidden, 3))
        self.merge = conv(2 * hidden, outputs)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.main(x)
        z = self.bottleneck(y)
        return self.merge(torch.cat([y + z if self.residual else z, self.side(x)], 1))


class Head(nn.Module):  # type: ignore[misc]
    """Decoupled head of one stride: class logits and box terms."""

    def __init__(self, inputs: int, *, stride: int) -> None:
        super().__init__()
        self.cells = (IMAGE_SIZE_PX // stride) ** 2
        self.stem = conv(inputs, 48)
        self.scores = nn.Sequential(separable(48, 48), nn.Conv2d(48, len(CLASS_NAMES), 1))
        self.boxes = nn.Sequential(separable(48, 48), separable(48, 48), nn.Conv2d(48, 4, 1))
        nn.init.constant_(self.scores[-1].bias, -math.log(99))  # a score of 0.01 at the start (arXiv:1708.02002, 4.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.cat([self.boxes(x), self.scores(x)], 1).reshape(-1, 4 + len(CLASS_NAMES), self.cells)


class Detector(nn.Module):  # type: ignore[misc]
    """Images (B x 3 x SIZE x SIZE, 0 to 1) to B x cells x (4 + classes): centre, width and height in pixels, scores."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 32, 3, stride=2), conv(32, 48, 3, stride=2), CSP(48, 48))
        self.stage3 = nn.Sequential(conv(48, 64, 3, stride=2), CSP(64, 64))
        self.stage4 = nn.Sequential(separable(64, 96, stride=2), CSP(96, 96))
        self.lateral, self.up = conv(96, 64), CSP(128, 64, residual=False)
        self.reduce, self.down = separable(64, 64, stride=2), CSP(128, 64, residual=False)
        self.heads = nn.ModuleList([Head(64, stride=stride) for stride in STRIDES])
        points = [
            (np.mgrid[: IMAGE_SIZE_PX // s, : IMAGE_SIZE_PX // s][::-1].reshape(2, -1) + 0.5) * s for s in STRIDES
        ]
        strides = [np.full(p.shape[1], s) for p, s in zip(points, STRIDES, strict=True)]
        self.register_buffer("centres", torch.tensor(np.concatenate(points, 1), dtype=torch.float32))
        self.register_buffer("strides", torch.tensor(np.concatenate(strides), dtype=torch.float32))

    def raw(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return decoded boxes (B x 4 x cells, centre and size in pixels) and class logits (B x classes x cells)."""
        fine = self.stage3(self.stem(images))
        lateral = self.lateral(self.stage4(fine))
        fine = self.up(torch.cat([functional.interpolate(lateral, scale_factor=2.0, mode="nearest"), fine], 1))
        coarse = self.down(torch.cat([self.reduce(fine), lateral], 1))
        terms = torch.cat([head(level) for head, level in zip(self.heads, (fine, coarse), strict=True)], 2)
        middle = terms[:, :2] * self.strides + self.centres
        size = torch.exp(terms[:, 2:4]) * self.strides
        return torch.cat([middle, size], 1), terms[:, 4:]

    def forward(self, images: Tensor) -> Tensor:
        boxes, logits = self.raw(images)
        return torch.cat([boxes, torch.sigmoid(logits)], 1).transpose(1, 2)


def iou_and_ciou(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return IoU and CIoU of boxes given as centre and size; the last axis is 4 and the others broadcast."""
    (ac, asize), (bc, bsize) = a.split(2, -1), b.split(2, -1)
    low, high = torch.maximum(ac - asize / 2, bc - bsize / 2), torch.minimum(ac + asize / 2, bc + bsize / 2)
    shared = (high - low).clamp(min=0).prod(-1)
    iou = shared / (asize.prod(-1) + bsize.prod(-1) - shared).clamp(min=1e-6)
    hull = torch.maximum(ac + asize / 2, bc + bsize / 2) - torch.minimum(ac - asize / 2, bc - bsize / 2)
    distance = (ac - bc).square().sum(-1) / hull.square().sum(-1).clamp(min=1e-6)
    turn = torch.atan(bsize[..., 0] / bsize[..., 1].clamp(min=1e-6)) - torch.atan(asize[..., 0] / asize[..., 1])
    shape = 4 / math.pi**2 * turn.square()
    weight = (shape / (1 - iou + shape).clamp(min=1e-6)).detach()
    return iou, iou - distance - weight * shape


def assign_cells(boxes: Tensor, scores: Tensor, targets: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Assign a shape and a target score to each cell by task alignment (TOOD, section 3.2).

    Args:
        boxes: B x cells x 4, predicted.
        scores: B x cells x classes, predicted, 0 to 1.
        targets: B x M x 5, class index (-1: padding), centre and size in pixels.
        centres: cells x 2, the cells' centres in pixels.

    Returns:
        Index of the shape (B x cells) and target score (B x cells; 0: background).
    """
    valid = targets[..., 0] >= 0
    label = targets[..., 0].clamp(min=0).long()
    iou, _ = iou_and_ciou(boxes[:, None], targets[:, :, None, 1:])
    score = scores.transpose(1, 2).gather(1, label[..., None].expand(-1, -1, scores.shape[1]))
    inside = (centres - targets[:, :, None, 1:3]).abs().amax(-1) < (targets[..., 3:].amax(-1) / 2).clamp(min=6)[
        ..., None
    ]
    metric = score.sqrt() * iou.pow(4) * inside * valid[..., None]
    chosen = metric * (metric >= metric.topk(8, -1).values[..., -1:]) * (metric > 0)
    scaled = chosen / chosen.amax(-1, keepdim=True).clamp(min=1e-9) * (iou * (chosen > 0)).amax(-1, keepdim=True)
    quality, owner = scaled.max(1)
    return owner, quality


def loss(model: Tensor, images: Tensor, targets: Tensor) -> Tensor:
    """Return cross entropy of scores plus CIoU loss of boxes, per unit of target score (TOOD, section 3.3)."""
    boxes, logits = model.raw(images)
    boxes, logits = boxes.transpose(1, 2), logits.transpose(1, 2)
    with torch.no_grad():
        owner, quality = assign_cells(boxes, logits.sigmoid(), targets, model.centres.T)
    matched = targets.gather(1, owner[..., None].expand(-1, -1, 5))
    hot = functional.one_hot(matched[..., 0].clamp(min=0).long(), len(CLASS_NAMES)) * quality[..., None]
    scores = functional.binary_cross_entropy_with_logits(logits, hot, reduction="sum")
    _, ciou = iou_and_ciou(boxes, matched[..., 1:])
    total = quality.sum().clamp(min=1.0)
    return (scores + ((1 - ciou) * quality).sum() * 4) / total


def _arrays(data: ShapesSplit) -> tuple[Tensor, Tensor]:
    """Return images as N x 3 x SIZE x SIZE bytes, labels as N x M x 5 (class or -1, centre, size)."""
    labels = np.full((len(data.images), 6, 5), -1.0, np.float32)
    labels[..., 3:] = 1.0
    used = np.zeros(len(data.images), int)
    for item in data.coco["annotations"]:
        image, (x, y, width, height) = item["image_id"] - 1, item["bbox"]
        labels[image, used[image]] = item["category_id"] - 1, x + width / 2, y + height / 2, width, height
        used[image] += 1
    return torch.from_numpy(np.stack(data.images).transpose(0, 3, 1, 2).copy()), torch.from_numpy(labels)


def _augment(images: Tensor, targets: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Transform the batch by one of the eight symmetries of the square, drawn at random, and permute its channels."""
    targets = targets.clone()
    for axis in (1, 2):
        if rng.random() < 0.5:
            images = images.flip(4 - axis)
            targets[..., axis] = IMAGE_SIZE_PX - targets[..., axis]
    if rng.random() < 0.5:
        images, targets = images.transpose(2, 3), targets[..., [0, 2, 1, 4, 3]]
    return images[:, rng.permutation(3).tolist()].contiguous(), targets


def train(data: ShapesSplit, *, epochs: int, batch: int = 16, seed: int = SEED) -> Tensor:
    """Train a detector; AdamW with one warm-up epoch and cosine decay, weights averaged over steps."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    images, targets = _arrays(data)
    model = Detector().to(memory_format=torch.channels_last).train()
    mean = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999), use_buffers=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.02)
    steps = len(images) // batch
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / steps, 0.5 + 0.5 * math.cos(math.pi * s / (epochs * steps)))
    )
    for epoch in range(epochs):
        order, total = rng.permutation(len(images)), 0.0
        for step in range(steps):
            chosen = torch.from_numpy(order[step * batch : (step + 1) * batch])
            x, y = _augment(images[chosen], targets[chosen], rng)
            value = loss(model, x.float().div(255).to(memory_format=torch.channels_last), y)
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            schedule.step()
            mean.update_parameters(model)
            total += value.item()
        _log.info("epoch %d of %d: loss %.4f", epoch + 1, epochs, total / steps)
    return mean.module.eval()


def export(model: Tensor, path: Path) -> None:
    """Write the trained detector as ONNX, opset 17, BatchNormalization folded into the convolutions."""
    torch.onnx.export(
        model.cpu().to(memory_format=torch.contiguous_format),
        (torch.zeros(1, 3, IMAGE_SIZE_PX, IMAGE_SIZE_PX),),
        path,
        input_names=["images"],
        output_names=["detections"],
        opset_version=17,
        dynamo=False,  # the exporter without further dependencies
    )


def main() -> None:
    """Train and write the `shapes_detector.onnx` of the zoo, or the file of `-o`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, default=TRAINED_MODEL_PATH)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--images", type=int, default=6000)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)  # with more, threads wait for each other wherever another process runs
    export(train(draw_split("train", arguments.images), epochs=arguments.epochs), arguments.output)


if __name__ == "__main__":
    main()
