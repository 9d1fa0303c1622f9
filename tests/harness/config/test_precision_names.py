"""Float precisions may be spelled as people spell them, wherever one is asked for."""

from __future__ import annotations

import pytest

from harness.base.errors import UserError
from harness.compat.modelopt_autotune import Config
from harness.compat.modelopt_autotune.settings import get_parser
from harness.compat.tao_specs import ptq
from harness.compat.tao_specs.spec import parse_spec
from harness.config.experiment import parse_experiment
from harness.config.sections import normalize_float_precision
from harness.plugins import registry
from harness.run.prepare.preflight import check_experiment


@pytest.mark.parametrize(("text", "name"), [
    ("fp16", "f16"), ("FP32", "f32"), ("bfloat16", "bf16"), ("TF32", "tf32"), ("f16", "f16"), ("auto", "auto"),
])  # fmt: skip
def test_common_spellings_are_normalized(text, name):
    assert normalize_float_precision(text) == name


@pytest.mark.parametrize(("backend", "params"), [
    ("openvino", {"precision": "fp32"}),
    ("onnxruntime", {"precision": "FP32"}),
    ("tensorrt", {"precision": "fp16"}),
    ("tensorrt", {"precision": "bfloat16"}),
    ("trtexec", {"precision": "TF32"}),
])  # fmt: skip
def test_backends_accept_common_spellings(tmp_path, backend, params):
    backends = str([{"use": backend, "params": params}]).replace("'", '"')
    text = f'{{"experiment": "e", "models": ["zoo:mlp"], "backends": {backends}, "initial": "none", "baselines": []}}'
    check_experiment(parse_experiment(text.replace("zoo:mlp", _zoo()), "e.yaml", tmp_path))
    made = registry.create_plugin("benchmarker", backend, params)
    assert getattr(made, "_float", None) in (None, "f32")


def _zoo() -> str:
    from harness import zoo

    return f"zoo:{next(iter(zoo.model_names()))}"


def test_command_lines_and_specs_accept_common_spellings():
    assert get_parser().parse_args(["-m", "m", "--default_dq_dtype", "fp16"]).default_dq_dtype == "float16"
    assert Config(default_dq_dtype="bf16").default_dq_dtype == "bfloat16"
    assert ptq.get_parser().parse_args(["--high_precision_dtype", "float32"]).high_precision_dtype == "fp32"
    for text, name in (("fp16", "FP16"), ("BF16", "BF16"), ("tf32", "TF32"), ("float32", "FP32")):
        spec = parse_spec(f"gen_trt_engine: {{onnx_file: a, trt_engine: b, tensorrt: {{data_type: {text}}}}}", "s")
        assert spec.gen_trt_engine is not None
        assert spec.gen_trt_engine.tensorrt.data_type == name


def test_float_precision_as_target_is_refused_with_remedy():
    with pytest.raises(UserError, match=r"precision.*'fp16'.*params: \{precision: f16\}"):
        parse_experiment('{"experiment": "e", "models": ["m.onnx"], "precision": ["fp16"]}', "e.yaml")
