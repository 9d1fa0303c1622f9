"""The training of the detector, in small."""

import importlib

import numpy as np
import onnxruntime as ort
import pytest

from harness.zoo.shapes import draw_split


@pytest.fixture(scope="module")
def torch():
    """Takes seconds to be loaded, so not while tests are collected."""
    loaded = pytest.importorskip("torch")
    loaded.set_num_threads(1)
    return loaded


@pytest.fixture(scope="module")
def train_shapes(torch):
    return importlib.import_module("train_shapes")


def test_iou_and_ciou_of_known_boxes(torch, train_shapes):
    box = torch.tensor([[50.0, 50.0, 20.0, 20.0]])
    other = torch.tensor([[50.0, 50.0, 20.0, 20.0], [60.0, 50.0, 20.0, 20.0], [90.0, 90.0, 10.0, 10.0]])
    iou, ciou = train_shapes.iou_and_ciou(box, other)
    assert iou.tolist() == pytest.approx([1.0, 1 / 3, 0.0])
    # 10 pixels apart in a hull of 30 by 20: the penalty is 100 / 1300 (arXiv:1911.08287, eq. 7).
    assert ciou.tolist()[:2] == pytest.approx([1.0, 1 / 3 - 100 / 1300])
    assert ciou[2] < 0


def test_assign_cells_matches_shapes_and_ignores_padding(torch, train_shapes):
    centres = torch.tensor([[20.0, 20.0], [60.0, 60.0], [100.0, 100.0], *([[4.0, 120.0]] * 6)])
    boxes = torch.cat([centres, torch.full((9, 2), 20.0)], 1)[None]
    scores = torch.full((1, 9, 3), 0.3)
    targets = torch.tensor([[[0.0, 20, 20, 20, 20], [2.0, 60, 60, 20, 10], [-1.0, 100, 100, 20, 20]]])
    owner, quality = train_shapes.assign_cells(boxes, scores, targets, centres)
    assert owner[0, :2].tolist() == [0, 1]
    assert quality[0].tolist() == pytest.approx([1.0, 0.5, *[0.0] * 7])


def test_a_few_steps_lower_the_loss(torch, train_shapes):
    torch.manual_seed(0)
    model = train_shapes.Detector().train()
    images, targets = train_shapes._arrays(draw_split("train", 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    values = []
    for _ in range(12):
        value = train_shapes.loss(model, images.float() / 255, targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < 0.9 * values[0]


def test_training_is_deterministic_and_the_export_is_equal(torch, train_shapes, tmp_path):
    data = draw_split("train", 4)
    model, again = (train_shapes.train(data, epochs=1, batch=4, seed=3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    image = np.random.default_rng(0).random((1, 3, 128, 128), np.float32)
    with torch.no_grad():
        expected = model(torch.from_numpy(image)).numpy()
    with pytest.warns(DeprecationWarning, match="legacy TorchScript-based ONNX export"):
        train_shapes.export(model, tmp_path / "model.onnx")
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(["detections"], {"images": image})
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
